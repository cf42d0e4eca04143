/* What is said about one entry of a folder. */
#ifndef HW_FILES_ENTRY_H
#define HW_FILES_ENTRY_H

#include <stdbool.h>
#include <sys/stat.h>

#include "say.h"

/* Takes the argument `links`: with it, of symbolic links it is told what they lead to. */
void entry_take(void);
/* The members of an entry object, without its braces. `target` is NULL but for a symbolic link. `name` in the folder `at` is where the
   entry is found again for what the arguments ask beside `st`; what stands there by now and is another entry is not told of. */
void entry_members(struct line *line, const char *absolute, const struct stat *st, const char *target, int at, const char *name);
/* The member "entry" of a line, for the path as the caller gave it. */
void entry_member(struct line *line, const char *path, const struct stat *st, const char *target);

/* The names of accounts, or NULL. */
const char *user_name(uid_t uid);
const char *group_name(gid_t gid);
/* The text of /etc/passwd; "" where it cannot be had. */
const char *passwd_text(void);

#endif
