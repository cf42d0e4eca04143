/* write: the whole file or nothing; or, where a caller asks for it, in place. */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "attributes.h"
#include "entry.h"
#include "octets.h"
#include "ops.h"
#include "owner.h"
#include "path.h"
#include "say.h"
#include "upload.h"

enum { CLAIMED_FROM = 1 << 20 }; /* smaller files find out soon enough that the disk is full */

static bool whole_piece; /* the beginning is written as one, so that a watch tells of a small file once */

static uint64_t bytes;

/* Takes the upload; with a size, exactly so much of it. */
static void receive(int fd, const char *path)
{
    bool sized = args_has("size");
    uint64_t size = args_number("size", UINT64_MAX - 1, 0, INT64_MAX - 1);
    pipe_widen(STDIN_FILENO);
    bool large = sized && size >= CLAIMED_FROM;
    enum moved moved = whole_piece && !large ? receive_piece(STDIN_FILENO, fd, size + 1, &bytes) : MOVED_ALL;
    if (moved == MOVED_ALL)
        moved = (large ? receive_octets : move_octets)(STDIN_FILENO, fd, size + 1 - bytes, &bytes);
    if (moved == MOVED_READ_FAILED)
        fail(errno, "the upload: %s", strerror(errno));
    if (moved == MOVED_WRITE_FAILED)
        fail_at(errno, path);
    if (sized && bytes != size)
        fail(EMSGSIZE, "the upload has %s than the %llu octets that were announced", bytes < size ? "less" : "more", (unsigned long long)size);
    if (fsync(fd) != 0)
        fail_at(errno, path);
}

static void flush_folder(int folder)
{
    int fd = folder_open(folder, "."); /* one that may not be read cannot be flushed */
    if (fd >= 0) {
        fsync(fd);
        close(fd);
    }
}

static void done(const char *path, const struct stat *st, bool created)
{
    struct line *line = say_ok();
    entry_member(line, path, st, NULL);
    line_bool(line, "created", created);
    say_end(line);
}

static void in_place(const char *path, bool append)
{
    uint64_t offset = args_number("offset", 0, 0, INT64_MAX / 2);
    bool truncate = args_flag("in_place"), created = false;
    struct stat st;
    if (truncate && (append || args_has("offset")))
        fail(EINVAL, "in_place stands beside no append and no offset");
    if (append && args_has("offset"))
        fail(EINVAL, "append stands beside no offset");
    int flags = O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC | (append ? O_APPEND : 0);
    int fd = open(path, flags);
    mode_t mode = args_mode("mode", 0644);
    if (fd < 0 && errno == ENOENT) {
        fd = open(path, flags | O_CREAT, mode & 0777);
        created = fd >= 0;
    }
    if (fd < 0 || fstat(fd, &st) != 0)
        fail_at(errno == ENXIO ? EINVAL : errno, path);
    if (!S_ISREG(st.st_mode))
        fail(EINVAL, "%.900s: not a regular file", path);
    whole_piece = true;
    /* Whoever watches is told of each of these: none is done for nothing. The change of owner takes set-user-id bits away. */
    if ((truncate && !created && ftruncate(fd, 0) != 0) || (offset && lseek(fd, (off_t)offset, SEEK_SET) < 0) || !owner_give(fd) ||
        ((created ? mode & 07000 : args_has("mode")) && fchmod(fd, mode) != 0) || !attributes_replace(fd))
        fail_at(errno, path);
    receive(fd, path);
    if (fstat(fd, &st) != 0)
        fail_at(errno, path);
    done(path, &st, created);
}

static void replace(const char *path)
{
    struct stat old = {.st_mode = 0644}, made;
    struct place place = place_of(path);
    int error = place_follow(&place);
    if (error)
        fail_at(error, path);
    bool created = fstatat(place.folder, place.name, &old, AT_SYMLINK_NOFOLLOW) != 0;
    if (created && errno != ENOENT)
        fail_at(errno, path);
    if (!created && !S_ISREG(old.st_mode))
        fail(S_ISDIR(old.st_mode) ? EISDIR : EINVAL, "%.900s: not a regular file", path);
    if (!created && faccessat(place.folder, place.name, W_OK, 0) != 0)
        fail_at(errno, path);
    upload_sweep(place.folder);
    int fd = upload_open(place.folder);
    if (fd < 0 || fstat(fd, &made) != 0)
        fail_at(errno, path);
    if (!owner_give(fd))
        fail_at(errno, path);
    if (!created && !owner_there() && (made.st_uid != old.st_uid || made.st_gid != old.st_gid) && fchown(fd, old.st_uid, old.st_gid) != 0) {
        if (errno != EPERM)
            fail_at(errno, path);
        fail(EPERM, "%.900s: is somebody else's, and a new file would not be; write in place, or remove it first", path);
    }
    uint64_t size = args_number("size", 0, 0, INT64_MAX - 1);
    if (size >= CLAIMED_FROM && fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)size) != 0 &&
        (errno == ENOSPC || errno == EDQUOT || errno == EFBIG))
        fail_at(errno, path);
    /* Before the flush, and behind the change of owner, which takes set-user-id bits away. */
    if (fchmod(fd, args_mode("mode", created ? 0644 : old.st_mode & 01777)) != 0 || !attributes_replace(fd))
        fail_at(errno, path);
    receive(fd, path);
    if (fstat(fd, &made) != 0)
        fail_at(errno, path);
    error = upload_place(place.name, true);
    if (error == EBUSY)
        fail(EBUSY, "%.900s: is a mount point and cannot be replaced; write in place", path);
    if (error)
        fail_at(error, path);
    flush_folder(place.folder);
    done(path, &made, created);
}

void op_write(void)
{
    const char *path = args_path("path");
    bool append = args_flag("append");
    say_count("bytes", &bytes);
    args_mode("mode", 0);
    if (args_flag("parents"))
        path_make_parents(path);
    if (append || args_flag("in_place") || args_has("offset"))
        in_place(path, append);
    else
        replace(path);
}
