/* move: one rename or, for a file between file systems, a whole copy that takes its name in one. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "args.h"
#include "entry.h"
#include "octets.h"
#include "ops.h"
#include "path.h"
#include "say.h"
#include "upload.h"

enum { NO_REPLACE = 1 }; /* RENAME_NOREPLACE */

static int rename_to(const struct place *from, const struct place *to, bool overwrite)
{
    return (int)syscall(SYS_renameat2, from->folder, from->name, to->folder, to->name, overwrite ? 0 : NO_REPLACE);
}

/* Gives a copy its name: without `overwrite` only where there is none. */
static void put_in_place(int folder, const char *made, const struct place *to, bool overwrite, const char *path)
{
    struct place copy = {.folder = folder};
    snprintf(copy.name, sizeof copy.name, "%s", made);
    if (rename_to(&copy, to, overwrite) != 0) {
        int error = errno;
        unlinkat(folder, made, 0);
        fail_at(error, path);
    }
}

static void copy_link(const struct place *from, const struct place *to, bool overwrite, const char *path)
{
    char target[PATH_ROOM], made[64];
    ssize_t length = readlinkat(from->folder, from->name, target, sizeof target - 1);
    if (length < 0)
        fail_at(errno, path);
    target[length] = 0;
    unused_name(made, ".hatchway-link.");
    if (symlinkat(target, to->folder, made) != 0)
        fail_at(errno, path);
    put_in_place(to->folder, made, to, overwrite, path);
}

static void copy_file(const struct place *from, const struct place *to, bool overwrite, const char *path)
{
    struct stat st, there;
    uint64_t bytes = 0;
    int in = openat(from->folder, from->name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    if (in < 0 || fstat(in, &st) != 0)
        fail_at(errno, path);
    if (!S_ISREG(st.st_mode))
        fail(EXDEV, "%.900s: only files and links are moved between file systems", path);
    if (fstatat(to->folder, to->name, &there, AT_SYMLINK_NOFOLLOW) == 0 && (!overwrite || S_ISDIR(there.st_mode)))
        fail_at(overwrite ? EISDIR : EEXIST, path);
    int out = upload_open(to->folder);
    if (out < 0)
        fail_at(errno, path);
    if (fchown(out, st.st_uid, st.st_gid) != 0 && errno != EPERM)
        fail_at(errno, path);
    if (move_octets(in, out, UINT64_MAX, &bytes) != MOVED_END || fchmod(out, st.st_mode & 07777) != 0 ||
        futimens(out, (struct timespec[]){st.st_atim, st.st_mtim}) != 0 || fsync(out) != 0)
        fail_at(errno, path);
    int error = upload_place(to->name, overwrite);
    if (error)
        fail_at(error, path);
    close(in);
}

void op_move(void)
{
    const char *from_path = args_path("from"), *to_path = args_path("to");
    bool overwrite = args_flag("overwrite");
    struct place from = place_of(from_path);
    if (args_flag("parents"))
        path_make_parents(to_path);
    struct place to = place_of(to_path);
    char target[PATH_ROOM] = "";
    struct stat st;
    if (fstatat(from.folder, from.name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        fail_at(errno, from_path);
    if (rename_to(&from, &to, overwrite) != 0) {
        if (errno == EEXIST && overwrite)
            errno = ENOTEMPTY;
        if (errno != EXDEV)
            fail_at(errno, errno == EACCES || errno == EPERM || errno == EBUSY ? from_path : to_path);
        if (!S_ISREG(st.st_mode) && !S_ISLNK(st.st_mode))
            fail(EXDEV, "%.900s: only files and links are moved between file systems", from_path);
        if (S_ISLNK(st.st_mode))
            copy_link(&from, &to, overwrite, to_path);
        else
            copy_file(&from, &to, overwrite, to_path);
        if (unlinkat(from.folder, from.name, 0) != 0)
            fail(errno, "%.900s: was copied, but not removed from where it was: %s", from_path, strerror(errno));
    }
    if (fstatat(to.folder, to.name, &st, AT_SYMLINK_NOFOLLOW) != 0 ||
        (S_ISLNK(st.st_mode) && readlinkat(to.folder, to.name, target, sizeof target - 1) < 0))
        fail_at(errno, to_path);
    struct line *line = say_ok();
    entry_member(line, to_path, &st, S_ISLNK(st.st_mode) ? target : NULL);
    say_end(line);
}
