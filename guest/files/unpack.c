/* unpack: a tar archive into a folder, and nowhere else. Every folder on the way to a member is opened by the kernel with the rule that
   it lies below; files and links are made under another name and renamed, so that nothing is written through what is there. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "../abi.h"
#include "args.h"
#include "octets.h"
#include "ops.h"
#include "path.h"
#include "say.h"
#include "tar.h"
#include "upload.h"

enum { MAX_OPEN_FOLDERS = 128, SPLICED_FROM = 1 << 16, MAX_TRIES = 100 };

static struct tar_reader reader;
static struct tar_member *const member = &reader.member;
static uint64_t files, dirs, links, bytes, skipped;
static int destination;
static bool owners;

/* -- the upload */

static size_t from, until; /* what of `piece` was read and not used */

/* Reads on when there is nothing left; false at the end. */
static bool fill(void)
{
    if (from < until)
        return true;
    ssize_t n = read_some(STDIN_FILENO, piece, sizeof piece);
    if (n < 0)
        fail(errno, "the upload: %s", strerror(errno));
    from = 0;
    until = (size_t)n;
    return n > 0;
}

/* Takes `count` octets, to a file or (-1) to nowhere. */
static void take(int fd, uint64_t count)
{
    while (count > 0) {
        if (from == until && fd >= 0 && count >= SPLICED_FROM) {
            uint64_t moved = 0;
            enum moved result = move_octets(STDIN_FILENO, fd, count, &moved);
            bytes += moved;
            if (result == MOVED_WRITE_FAILED)
                fail_at(errno, member->name);
            if (result == MOVED_READ_FAILED)
                fail(errno, "the upload: %s", strerror(errno));
            if (result == MOVED_END)
                fail(EBADMSG, "the archive ends in the middle of %.900s", member->name);
            return;
        }
        if (!fill())
            fail(EBADMSG, "the archive ends in the middle of %.900s", member->name);
        size_t part = until - from < count ? until - from : (size_t)count;
        if (fd >= 0) {
            if (!write_whole(fd, piece + from, part))
                fail_at(errno, member->name);
            bytes += part;
        }
        from += part;
        count -= part;
    }
}

/* The next member; false at the end of the archive. */
static bool next_member(void)
{
    for (;;) {
        uint8_t block[TAR_BLOCK];
        size_t length = 0;
        while (length < sizeof block && fill()) {
            size_t part = until - from < sizeof block - length ? until - from : sizeof block - length;
            memcpy(block + length, piece + from, part);
            from += part;
            length += part;
        }
        if (length == 0 && tar_may_end(&reader))
            return false;
        if (length < sizeof block)
            fail(EBADMSG, "the archive was cut off");
        switch (tar_read(&reader, block)) {
        case TAR_MORE:
            continue;
        case TAR_MEMBER:
            return true;
        case TAR_END:
            return false;
        case TAR_UNSUPPORTED:
            fail(EOPNOTSUPP, "%.900s: %s", member->name, reader.why);
        case TAR_BAD:
            fail(EBADMSG, "the archive has %s", reader.why);
        }
    }
}

/* -- folders */

/* Opens what lies below the destination, whatever its links say; -1 with errno. */
static int open_beneath(const char *name, int flags)
{
    struct hw_open_how how = {
        .flags = (uint64_t)(unsigned)(flags | O_CLOEXEC),
        .resolve = HW_RESOLVE_BENEATH | HW_RESOLVE_NO_MAGICLINKS,
    };
    for (int tries = 0; tries < MAX_TRIES; tries++) {
        long fd = raw6(SYS_openat2, destination, (long)name, (long)&how, sizeof how, 0, 0);
        if (fd >= 0)
            return (int)fd;
        errno = (int)-fd;
        if (errno != EAGAIN && errno != EINTR) /* somebody renames */
            break;
    }
    return -1;
}

static _Noreturn void fail_member(int error)
{
    if (error == EXDEV || error == ELOOP)
        fail(EBADMSG, "%.900s: a link leads out of the folder, or nowhere", member->name);
    fail_at(error, member->name);
}

/* Folders that the archive made and is still in: they get their modes and times when it leaves them. */
static struct {
    int fd;
    size_t length; /* of its name in `inside` */
    uint32_t mode, mtime_ns;
    int64_t mtime;
} left[MAX_OPEN_FOLDERS];
static int depth;
static char inside[TAR_NAME];

static void finish_folder(int fd, uint32_t mode, int64_t mtime, uint32_t mtime_ns)
{
    if (fchmod(fd, mode) != 0 || futimens(fd, (struct timespec[]){{0, UTIME_OMIT}, {mtime, mtime_ns}}) != 0)
        fail_at(errno, member->name);
    close(fd);
}

static void leave_folders(const char *name)
{
    for (; depth > 0; depth--) {
        size_t length = left[depth - 1].length;
        if (strncmp(inside, name, length) == 0 && name[length] == '/')
            return;
        finish_folder(left[depth - 1].fd, left[depth - 1].mode, left[depth - 1].mtime, left[depth - 1].mtime_ns);
        inside[depth > 1 ? left[depth - 2].length : 0] = 0;
    }
}

static uint32_t mode_of_member(void)
{
    return owners ? member->mode : member->mode & 0777;
}

/* The folder that a member goes into, made where it is missing; its last name goes to *name. The one of the last time stays open. */
static int parent_of(const char **name)
{
    static char last[TAR_NAME];
    static int fd = -1;
    char path[TAR_NAME];
    const char *slash = strrchr(member->name, '/');
    size_t length = slash ? (size_t)(slash - member->name) : 0;
    *name = slash ? slash + 1 : member->name;
    if (length == 0)
        return destination;
    if (fd >= 0 && strlen(last) == length && memcmp(last, member->name, length) == 0)
        return fd;
    memcpy(path, member->name, length);
    path[length] = 0;
    if (fd >= 0)
        close(fd);
    fd = open_beneath(path, O_PATH | O_DIRECTORY);
    if (fd < 0 && errno == ENOENT) {
        int above = destination;
        for (char *at = path, *end; at; at = end ? end + 1 : NULL) {
            if ((end = strchr(at, '/')))
                *end = 0;
            if (mkdirat(above, at, 0755) != 0 && errno != EEXIST)
                fail_member(errno);
            fd = open_beneath(path, O_PATH | O_DIRECTORY);
            if (fd < 0)
                fail_member(errno);
            if (above != destination)
                close(above);
            above = fd;
            if (end)
                *end = '/';
        }
    }
    if (fd < 0)
        fail_member(errno);
    strcpy(last, path);
    return fd;
}

/* -- members */

static void make_folder(void)
{
    const char *name;
    int parent = parent_of(&name);
    if (mkdirat(parent, name, 0700) != 0) {
        int there = errno == EEXIST ? open_beneath(member->name, O_PATH | O_DIRECTORY) : -1;
        if (there < 0)
            fail_member(errno);
        close(there);
        return;
    }
    dirs++;
    int fd = openat(parent, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0)
        fail_member(errno);
    if (owners && fchown(fd, member->uid, member->gid) != 0)
        fail_at(errno, member->name);
    if (depth == MAX_OPEN_FOLDERS) { /* as deep as that nobody puts a folder that may not be written */
        finish_folder(fd, mode_of_member(), member->mtime, member->mtime_ns);
        return;
    }
    left[depth].fd = fd;
    left[depth].mode = mode_of_member();
    left[depth].mtime = member->mtime;
    left[depth].mtime_ns = member->mtime_ns;
    left[depth++].length = strlen(member->name);
    strcpy(inside, member->name);
}

static void make_file(void)
{
    const char *name;
    int parent = parent_of(&name), fd = upload_open(parent);
    if (fd < 0)
        fail_member(errno);
    take(fd, member->size);
    if ((owners && fchown(fd, member->uid, member->gid) != 0) || fchmod(fd, mode_of_member()) != 0 ||
        futimens(fd, (struct timespec[]){{0, UTIME_OMIT}, {member->mtime, member->mtime_ns}}) != 0)
        fail_at(errno, member->name);
    int error = upload_place(name, true);
    if (error)
        fail_at(error, member->name);
    take(-1, tar_padding(member->size));
    files++;
}

static int make_as(int parent, const char *name, int source)
{
    switch (member->type) {
    case TAR_SYMLINK:
        return symlinkat(member->target, parent, name);
    case TAR_HARD_LINK:
        return linkat(AT_FDCWD, path_of_fd(source), parent, name, AT_SYMLINK_FOLLOW);
    default:
        return mkfifoat(parent, name, mode_of_member());
    }
}

/* A link or a FIFO: made at once where there is nothing, else under another name that then takes the place. */
static void make_other(int source)
{
    const char *name;
    char between[64];
    int parent = parent_of(&name);
    if (make_as(parent, name, source) != 0) {
        if (errno != EEXIST)
            fail_member(errno);
        unused_name(between, ".hatchway-link.");
        if (make_as(parent, between, source) != 0)
            fail_member(errno);
        int result = renameat(parent, between, parent, name), error = errno;
        unlinkat(parent, between, 0); /* two names of one file stay both */
        if (result != 0)
            fail_member(error);
    }
    if (member->type == TAR_HARD_LINK)
        return;
    if ((owners && fchownat(parent, name, member->uid, member->gid, AT_SYMLINK_NOFOLLOW) != 0) ||
        utimensat(parent, name, (struct timespec[]){{0, UTIME_OMIT}, {member->mtime, member->mtime_ns}}, AT_SYMLINK_NOFOLLOW) != 0)
        fail_member(errno);
}

static void make_hard_link(void)
{
    char target[TAR_NAME];
    struct stat st;
    strcpy(target, member->target);
    if (!tar_clean(target) || !*target)
        fail(EBADMSG, "%.900s: a hard link to what is not below the folder", member->name);
    int source = open_beneath(target, O_PATH | O_NOFOLLOW);
    if (source < 0 || fstat(source, &st) != 0)
        fail_member(errno);
    if (S_ISDIR(st.st_mode))
        fail(EBADMSG, "%.900s: a hard link to a folder", member->name);
    make_other(source);
    close(source);
}

static void unpack_member(void)
{
    char whole[TAR_NAME];
    strcpy(whole, member->name);
    if (!tar_clean(member->name))
        fail(EBADMSG, "%.900s: a name that leads out of the folder", whole);
    if (member->type != TAR_NOTHING && !member->name[0] && member->type != TAR_FOLDER)
        fail(EBADMSG, "the archive has a member without a name");
    leave_folders(member->name);
    switch (member->type) {
    case TAR_FILE:
        make_file();
        break;
    case TAR_FOLDER:
        if (member->name[0]) /* the folder itself is as the caller has it */
            make_folder();
        break;
    case TAR_SYMLINK:
        make_other(-1);
        links++;
        break;
    case TAR_HARD_LINK:
        make_hard_link();
        links++;
        break;
    case TAR_FIFO:
        make_other(-1);
        files++;
        break;
    case TAR_CHAR:
    case TAR_BLOCK_DEVICE:
        skipped++;
        break;
    case TAR_NOTHING:
        take(-1, member->size + tar_padding(member->size));
        break;
    }
}

void op_unpack(void)
{
    const char *path = args_path("path");
    owners = args_flag("owners");
    if (owners && geteuid() != 0)
        fail(EPERM, "owners=1 is for root");
    if (args_flag("parents"))
        path_make_all(path);
    destination = open(path, O_RDONLY | O_DIRECTORY | O_NONBLOCK | O_CLOEXEC);
    if (destination < 0)
        fail_at(errno, path);
    say_count("files", &files);
    say_count("dirs", &dirs);
    say_count("links", &links);
    say_count("bytes", &bytes);
    say_count("skipped", &skipped);
    pipe_widen(STDIN_FILENO);
    while (next_member())
        unpack_member();
    leave_folders("");
    while (from = until, fill()) /* what is behind the end */
        ;
    if (syncfs(destination) != 0)
        fail_at(errno, path);
    say_end(say_ok());
}
