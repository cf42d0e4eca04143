/* Paths that a caller gives: the kernel resolves what leads to their last name, and from there on descriptors count. */
#ifndef HW_FILES_PATH_H
#define HW_FILES_PATH_H

#include <limits.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/stat.h>

enum { PATH_ROOM = 4096 };

/* A name in an open folder. */
struct place {
    int folder; /* O_PATH */
    char name[NAME_MAX + 1];
};

/* The absolute form of a path, as the entries show it: no empty components and no `.`. False: longer than PATH_ROOM - 1. */
bool path_absolute(const char *path, char absolute[PATH_ROOM]);
/* `base`/`name` in place; false where it would be too long. */
bool path_join(char base[PATH_ROOM], const char *name);

/* Opens the folder that holds the path's last name (slashes behind it do not count); 0 or an errno. EINVAL: it ends in `.` or `..`. */
int place_at(int from, const char *path, struct place *place);
/* The same, where an error ends the run. */
struct place place_of(const char *path);
/* Follows symbolic links at the place until it is none, with the kernel's rule for sticky folders; 0 or an errno. */
int place_follow(struct place *place);

/* Makes the folders that lead to a path's last name, or all of it, and gives them to the owner. An error ends the run. */
void path_make_parents(const char *path);
void path_make_all(const char *path);

/* Opens a folder to read it, without following a symbolic link; -1 with errno. */
int folder_open(int at, const char *name);
/* Another name of an open descriptor, for calls that take none that was opened with O_PATH. */
const char *path_of_fd(int fd);

#endif
