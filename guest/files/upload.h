/* A file in the making. It has no name, or one that says what it is, until it is whole and takes its own in one rename. */
#ifndef HW_FILES_UPLOAD_H
#define HW_FILES_UPLOAD_H

#include <stdbool.h>

/* Makes it in a folder; its descriptor, or -1 with errno. There is one at a time. */
int upload_open(int folder);
/* Gives it its name and closes it. What was there goes or, without `replace`, is EEXIST. 0 or an errno (then it is gone). */
int upload_place(const char *name, bool replace);
/* Removes it, if there is one. */
void upload_discard(void);
/* Removes what killed runs left in a folder. */
void upload_sweep(int folder);
/* A name that nobody has, for what cannot be made in place: `prefix` and 16 digits. */
void unused_name(char name[64], const char *prefix);

#endif
