/* mkdir, remove and chmod. Trees are walked with descriptors: whoever renames in them meanwhile leads the walk nowhere else. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "args.h"
#include "entry.h"
#include "ops.h"
#include "owner.h"
#include "path.h"
#include "say.h"
#include "upload.h"

enum { REMOVE_LEVELS = 64, MAX_LEVELS = 256, MAX_ROUNDS = 10000 };

static uint64_t changed;   /* or removed */
static char shown[PATH_ROOM]; /* where the walk is, for its errors; cut where it is too long */

static size_t show(const char *name)
{
    size_t length = strlen(shown);
    path_join(shown, name);
    return length;
}

static bool is_dots(const char *name)
{
    return name[0] == '.' && (name[1] == 0 || (name[1] == '.' && name[2] == 0));
}

void op_mkdir(void)
{
    const char *path = args_path("path");
    bool parents = args_flag("parents"), created = false;
    mode_t mode = args_mode("mode", 0755);
    struct stat st;
    int fd = -1;
    if (!parents || stat(path, &st) != 0 || !S_ISDIR(st.st_mode)) {
        if (parents)
            path_make_parents(path);
        struct place place = place_of(path);
        created = mkdirat(place.folder, place.name, mode & 0777) == 0;
        if (!created && (!parents || errno != EEXIST))
            fail_at(errno, path);
        if (created)
            fd = openat(place.folder, place.name, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
    }
    if (!created)
        fd = open(path, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0 || (created && ((mode & 07000 && chmod(path_of_fd(fd), mode) != 0) || !owner_give_at(AT_FDCWD, path))) || fstat(fd, &st) != 0)
        fail_at(errno == ENOTDIR ? EEXIST : errno, path);
    struct line *line = say_ok();
    entry_member(line, path, &st, NULL);
    line_bool(line, "created", created);
    say_end(line);
}

/* -- remove */

static int top = -1; /* the folder that is removed; what is too deep in it is moved up to it */

static void remove_folder(int at, const char *name, int level);

static void move_up(int at, const char *name)
{
    char unused[64];
    unused_name(unused, ".hatchway-remove.");
    if (renameat(at, name, top, unused) != 0 && errno != ENOENT)
        fail_at(errno, shown);
}

static void remove_entry(int at, const char *name, bool folder, int level)
{
    if (!folder) {
        if (unlinkat(at, name, 0) == 0) {
            changed++;
            return;
        }
        if (errno == ENOENT)
            return;
        struct stat st;
        int error = errno;
        if (fstatat(at, name, &st, AT_SYMLINK_NOFOLLOW) != 0 || !S_ISDIR(st.st_mode))
            fail_at(error, shown);
    }
    if (unlinkat(at, name, AT_REMOVEDIR) == 0)
        changed++;
    else if (level < REMOVE_LEVELS)
        remove_folder(at, name, level);
    else
        move_up(at, name);
}

/* One pass over a folder; whether there was anything. */
static bool remove_content(DIR *dir, int level)
{
    struct dirent *entry;
    bool any = false;
    while (errno = 0, (entry = readdir(dir))) {
        if (is_dots(entry->d_name))
            continue;
        size_t length = show(entry->d_name);
        any = true;
        remove_entry(dirfd(dir), entry->d_name, entry->d_type == DT_DIR, level + 1);
        shown[length] = 0;
    }
    if (errno)
        fail_at(errno, shown);
    return any;
}

static void remove_folder(int at, const char *name, int level)
{
    int fd = folder_open(at, name);
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir) {
        int error = errno;
        if (error == ENOENT)
            return;
        if ((error == ENOTDIR || error == ELOOP) && unlinkat(at, name, 0) == 0) { /* swapped meanwhile */
            changed++;
            return;
        }
        fail_at(error, shown);
    }
    if (level == 0)
        top = fd;
    /* What comes while it goes (moved up from far below, or made by others) is found by another pass. */
    for (int rounds = 0;; rounds++) {
        bool any = remove_content(dir, level);
        if (unlinkat(at, name, AT_REMOVEDIR) == 0)
            break;
        if (errno == ENOENT) {
            changed--;
            break;
        }
        if ((errno != ENOTEMPTY && errno != EEXIST) || !any || rounds == MAX_ROUNDS)
            fail_at(errno, shown);
        rewinddir(dir);
    }
    changed++;
    closedir(dir);
}

void op_remove(void)
{
    const char *path = args_path("path");
    struct place place = place_of(path);
    struct stat st;
    say_count("removed", &changed);
    snprintf(shown, sizeof shown, "%s", path);
    if (fstatat(place.folder, place.name, &st, AT_SYMLINK_NOFOLLOW) != 0)
        fail_at(errno, path);
    if (args_flag("recursive"))
        remove_entry(place.folder, place.name, S_ISDIR(st.st_mode), 0);
    else if (unlinkat(place.folder, place.name, S_ISDIR(st.st_mode) ? AT_REMOVEDIR : 0) == 0)
        changed++;
    else
        fail_at(errno == EEXIST ? ENOTEMPTY : errno, path);
    say_end(say_ok());
}

/* -- chmod */

static void chmod_folder(int at, const char *name, mode_t mode, int level);

static void chmod_entry(int at, const char *name, mode_t mode, int level)
{
    struct stat st;
    int fd = openat(at, name, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    if (fd < 0 && errno == ENOENT)
        return;
    if (fd < 0 || fstat(fd, &st) != 0)
        fail_at(errno, shown);
    if (S_ISDIR(st.st_mode)) {
        chmod_folder(fd, ".", mode, level);
    } else if (!S_ISLNK(st.st_mode)) {
        if (chmod(path_of_fd(fd), mode) != 0)
            fail_at(errno, shown);
        changed++;
    }
    close(fd);
}

/* `at` and `name` are the folder itself: what was opened is what is changed. */
static void chmod_folder(int at, const char *name, mode_t mode, int level)
{
    if (level > MAX_LEVELS)
        fail(ENAMETOOLONG, "%.900s: deeper than %d folders", shown, MAX_LEVELS);
    int fd = folder_open(at, name);
    if (fd < 0 && errno == EACCES) { /* what may not be read may become readable by this */
        if (chmod(path_of_fd(at), mode) != 0)
            fail_at(errno, shown);
        fd = folder_open(at, name);
    }
    DIR *dir = fd < 0 ? NULL : fdopendir(fd);
    if (!dir)
        fail_at(errno, shown);
    struct dirent *entry;
    while (errno = 0, (entry = readdir(dir))) {
        if (is_dots(entry->d_name))
            continue;
        size_t length = show(entry->d_name);
        chmod_entry(fd, entry->d_name, mode, level + 1);
        shown[length] = 0;
    }
    if (errno || fchmod(fd, mode) != 0)
        fail_at(errno, shown);
    changed++;
    closedir(dir);
}

void op_chmod(void)
{
    const char *path = args_path("path");
    struct stat st;
    if (!args_has("mode"))
        fail(EINVAL, "mode is missing");
    mode_t mode = args_mode("mode", 0);
    bool recursive = args_flag("recursive");
    say_count("changed", &changed);
    snprintf(shown, sizeof shown, "%s", path);
    int fd = open(path, O_PATH | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &st) != 0)
        fail_at(errno, path);
    if (recursive && S_ISDIR(st.st_mode)) {
        chmod_folder(fd, ".", mode, 0);
    } else {
        if (chmod(path_of_fd(fd), mode) != 0)
            fail_at(errno, path);
        changed++;
    }
    if (fstat(fd, &st) != 0)
        fail_at(errno, path);
    struct line *line = say_ok();
    entry_member(line, path, &st, NULL);
    say_end(line);
}
