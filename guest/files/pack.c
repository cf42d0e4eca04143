/* pack: a tree as a tar archive. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "entry.h"
#include "octets.h"
#include "ops.h"
#include "path.h"
#include "say.h"
#include "tar.h"

enum { MAX_LEVELS = 256, MAX_LINKED = 1024, SPLICED_FROM = 1 << 16, GATHERED = 1 << 17 };

static struct tar_member member; /* whose name is where the walk is */
static uint64_t files, bytes, skipped, changed;

/* Headers and small files go out together. */
static uint8_t gathered[GATHERED];
static size_t gathered_length;

static void send_gathered(void)
{
    write_all(STDOUT_FILENO, gathered, gathered_length);
    gathered_length = 0;
}

static void send_zeros(uint64_t count)
{
    while (count > 0) {
        if (gathered_length == sizeof gathered)
            send_gathered();
        size_t part = sizeof gathered - gathered_length < count ? sizeof gathered - gathered_length : (size_t)count;
        memset(gathered + gathered_length, 0, part);
        gathered_length += part;
        count -= part;
    }
}

static void send_header(void)
{
    if (sizeof gathered - gathered_length < TAR_HEADER_ROOM)
        send_gathered();
    size_t length = tar_format(&member, gathered + gathered_length);
    if (length == 0)
        fail(ENAMETOOLONG, "%.900s: a name that is too long", member.name);
    gathered_length += length;
}

/* The data of a file, exactly as much as its header said. */
static void send_data(int fd)
{
    uint64_t sent = 0;
    bool ended = false;
    while (sent < member.size && !ended) {
        uint64_t left = member.size - sent;
        if (left >= SPLICED_FROM) {
            send_gathered();
            switch (move_octets(fd, STDOUT_FILENO, left, &sent)) {
            case MOVED_READ_FAILED:
                fail_at(errno, member.name);
            case MOVED_END:
                ended = true;
                break;
            default:
                break;
            }
            continue;
        }
        if (gathered_length == sizeof gathered)
            send_gathered();
        size_t room = sizeof gathered - gathered_length;
        ssize_t n = read_some(fd, gathered + gathered_length, left < room ? (size_t)left : room);
        if (n < 0)
            fail_at(errno, member.name);
        ended = n == 0;
        gathered_length += (size_t)n;
        sent += (uint64_t)n;
    }
    changed += sent < member.size;
    bytes += sent;
    send_zeros(member.size - sent);
    send_zeros(tar_padding(member.size));
}

/* The first names of files that have several. */
static struct linked {
    dev_t dev;
    ino_t ino;
    char *name;
} linked[MAX_LINKED];
static int linked_count;

/* Whether the file is in the archive already, under the name that goes into the target. */
static bool is_linked(const struct stat *st)
{
    for (int i = 0; i < linked_count; i++) {
        if (linked[i].dev == st->st_dev && linked[i].ino == st->st_ino) {
            strcpy(member.target, linked[i].name);
            return true;
        }
    }
    if (linked_count < MAX_LINKED && (linked[linked_count].name = strdup(member.name))) {
        linked[linked_count].dev = st->st_dev;
        linked[linked_count++].ino = st->st_ino;
    }
    return false;
}

static void describe(const struct stat *st, enum tar_type type)
{
    const char *user = user_name(st->st_uid), *group = group_name(st->st_gid);
    member.type = type;
    member.size = type == TAR_FILE ? (uint64_t)st->st_size : 0;
    member.mode = st->st_mode & 07777;
    member.uid = st->st_uid;
    member.gid = st->st_gid;
    member.mtime = st->st_mtim.tv_sec;
    member.user[0] = member.group[0] = 0;
    if (user && strlen(user) < sizeof member.user)
        strcpy(member.user, user);
    if (group && strlen(group) < sizeof member.group)
        strcpy(member.group, group);
    member.target[0] = 0;
}

static void pack_file(int at, const char *name)
{
    struct stat st;
    int fd = openat(at, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0) {
        if (errno == ENOENT || errno == ELOOP || errno == ENXIO)
            return; /* gone, or something else by now */
        fail_at(errno, member.name);
    }
    if (S_ISREG(st.st_mode)) {
        describe(&st, TAR_FILE);
        if (st.st_nlink > 1 && is_linked(&st)) {
            member.type = TAR_HARD_LINK;
            member.size = 0;
        }
        send_header();
        if (member.type == TAR_FILE)
            send_data(fd);
        files++;
    }
    close(fd);
}

static void pack_folder(int fd, int level);

static void pack_entry(int at, const char *name, int level)
{
    struct stat st;
    if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) != 0) {
        if (errno == ENOENT)
            return;
        fail_at(errno, member.name);
    }
    if (S_ISREG(st.st_mode)) {
        pack_file(at, name);
    } else if (S_ISDIR(st.st_mode)) {
        int fd = folder_open(at, name);
        if (fd < 0 && (errno == ENOENT || errno == ENOTDIR || errno == ELOOP))
            return;
        if (fd < 0 || fstat(fd, &st) != 0)
            fail_at(errno, member.name);
        describe(&st, TAR_FOLDER);
        send_header();
        pack_folder(fd, level);
    } else if (S_ISLNK(st.st_mode)) {
        describe(&st, TAR_SYMLINK);
        ssize_t length = readlinkat(at, name, member.target, sizeof member.target - 1);
        if (length <= 0)
            return;
        member.target[length] = 0;
        send_header();
    } else {
        skipped++;
    }
}

static void pack_folder(int fd, int level)
{
    DIR *dir = fdopendir(fd);
    size_t length = strlen(member.name);
    struct dirent *entry;
    if (!dir)
        fail_at(errno, member.name);
    if (level > MAX_LEVELS)
        fail(ENAMETOOLONG, "%.900s: deeper than %d folders", member.name, MAX_LEVELS);
    while (errno = 0, (entry = readdir(dir))) {
        const char *name = entry->d_name;
        if (strcmp(name, ".") == 0 || strcmp(name, "..") == 0)
            continue;
        if (!path_join(member.name, name))
            fail(ENAMETOOLONG, "%.900s: a name in it is too long", member.name);
        pack_entry(fd, name, level + 1);
        member.name[length] = 0;
    }
    if (errno)
        fail_at(errno, member.name);
    closedir(dir);
}

void op_pack(void)
{
    const char *path = args_path("path");
    char absolute[PATH_ROOM];
    struct stat st;
    int fd = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0)
        fail_at(errno, path);
    if ((!S_ISDIR(st.st_mode) && !S_ISREG(st.st_mode)) || !path_absolute(path, absolute))
        fail(EINVAL, "%.900s: neither a folder nor a file", path);
    struct line *line = say_head();
    entry_member(line, path, &st, NULL);
    say_end(line);
    say_count("files", &files);
    say_count("bytes", &bytes);
    say_count("skipped", &skipped);
    say_count("changed", &changed);
    pipe_widen(STDOUT_FILENO);
    if (S_ISDIR(st.st_mode)) {
        pack_folder(fd, 0);
    } else {
        strcpy(member.name, strrchr(absolute, '/') + 1);
        describe(&st, TAR_FILE);
        send_header();
        send_data(fd);
        files++;
    }
    send_zeros(2 * TAR_BLOCK);
    send_gathered();
    say_end(say_ok());
}
