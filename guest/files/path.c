#include "path.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "owner.h"
#include "say.h"

enum { MAX_LINKS = 40, PROC_MAGIC = 0x9fa0 };

bool path_join(char base[PATH_ROOM], const char *name)
{
    size_t length = strlen(base), more = strlen(name);
    bool slash = length > 0 && base[length - 1] != '/';
    if (length + slash + more >= PATH_ROOM)
        return false;
    if (slash)
        base[length++] = '/';
    memcpy(base + length, name, more + 1);
    return true;
}

bool path_absolute(const char *path, char absolute[PATH_ROOM])
{
    if (*path == '/' || !getcwd(absolute, PATH_ROOM) || *absolute != '/')
        strcpy(absolute, "/");
    while (*path) {
        char name[PATH_ROOM];
        size_t length = strcspn(path, "/");
        if (length >= sizeof name)
            return false;
        memcpy(name, path, length);
        name[length] = 0;
        if (length > 0 && strcmp(name, ".") != 0 && !path_join(absolute, name))
            return false;
        path += length + (path[length] == '/');
    }
    return true;
}

int place_at(int from, const char *path, struct place *place)
{
    char parent[PATH_ROOM];
    size_t length = strlen(path);
    if (length >= sizeof parent)
        return ENAMETOOLONG;
    while (length > 0 && path[length - 1] == '/')
        length--;
    size_t start = length;
    while (start > 0 && path[start - 1] != '/')
        start--;
    const char *name = path + start;
    size_t size = length - start;
    if (size == 0 || (size == 1 && *name == '.') || (size == 2 && name[0] == '.' && name[1] == '.'))
        return EINVAL;
    if (size > NAME_MAX)
        return ENAMETOOLONG;
    memcpy(place->name, name, size);
    place->name[size] = 0;
    memcpy(parent, path, start);
    parent[start] = 0;
    place->folder = openat(from, start ? parent : ".", O_PATH | O_DIRECTORY | O_CLOEXEC);
    return place->folder < 0 ? errno : 0;
}

struct place place_of(const char *path)
{
    struct place place;
    int error = place_at(AT_FDCWD, path, &place);
    if (error == EINVAL)
        fail(EINVAL, "%.900s: ends in no name", path);
    if (error)
        fail_at(error, path);
    return place;
}

int place_follow(struct place *place)
{
    for (int links = 0; links <= MAX_LINKS; links++) {
        struct stat st, folder;
        struct statfs fs;
        char target[PATH_ROOM];
        if (fstatat(place->folder, place->name, &st, AT_SYMLINK_NOFOLLOW) != 0)
            return errno == ENOENT ? 0 : errno;
        if (!S_ISLNK(st.st_mode))
            return 0;
        if (fstat(place->folder, &folder) != 0 || fstatfs(place->folder, &fs) != 0)
            return errno;
        if (fs.f_type == PROC_MAGIC)
            return EINVAL; /* such links say in words what they lead to in truth */
        /* What the kernel does with fs.protected_symlinks: in /tmp one user's link is no trap for another. */
        if ((folder.st_mode & (S_ISVTX | S_IWOTH)) == (S_ISVTX | S_IWOTH) && st.st_uid != geteuid() && st.st_uid != folder.st_uid)
            return EACCES;
        ssize_t length = readlinkat(place->folder, place->name, target, sizeof target - 1);
        if (length < 0)
            return errno;
        target[length] = 0;
        if (length == 0 || target[length - 1] == '/')
            return EISDIR;
        int from = place->folder;
        int error = place_at(from, target, place);
        close(from);
        if (error)
            return error == EINVAL ? EISDIR : error;
    }
    return ELOOP;
}

static void make_folders(char *path)
{
    struct stat st;
    if (stat(path, &st) == 0 && S_ISDIR(st.st_mode))
        return;
    for (char *at = path;; at++) {
        if (*at != '/' && *at != 0)
            continue;
        char kept = *at;
        *at = 0;
        if (at > path && mkdir(path, 0755) == 0) {
            if (!owner_give_at(AT_FDCWD, path))
                fail_at(errno, path);
        } else if (at > path) {
            int error = errno;
            if (stat(path, &st) != 0 || !S_ISDIR(st.st_mode))
                fail_at(error == EEXIST ? ENOTDIR : error, path);
        }
        *at = kept;
        if (!kept)
            return;
    }
}

void path_make_all(const char *path)
{
    char copy[PATH_ROOM];
    if (strlen(path) >= sizeof copy)
        fail_at(ENAMETOOLONG, path);
    strcpy(copy, path);
    make_folders(copy);
}

void path_make_parents(const char *path)
{
    char copy[PATH_ROOM];
    size_t length = strlen(path);
    if (length >= sizeof copy)
        fail_at(ENAMETOOLONG, path);
    strcpy(copy, path);
    while (length > 0 && copy[length - 1] == '/')
        length--;
    while (length > 0 && copy[length - 1] != '/')
        length--;
    copy[length] = 0;
    if (length > 0)
        make_folders(copy);
}

int folder_open(int at, const char *name)
{
    return openat(at, name, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
}

const char *path_of_fd(int fd)
{
    static char name[40];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    return name;
}
