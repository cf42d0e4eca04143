/* Extended attributes of the namespace `user`, as far as their names begin with the argument `attributes_of`; names are told and given
   without `user.` and without that beginning. Text only: what is no text, or too much, is left out and counted. */
#ifndef HW_FILES_ATTRIBUTES_H
#define HW_FILES_ATTRIBUTES_H

#include <stdbool.h>

#include "say.h"

/* Looks at the arguments `attributes_of` and `attributes`, NAME=VALUE lines; EINVAL for what is malformed. */
void attributes_take(void);
/* The members "attributes" and, where some are left out, "attributes_left_out" of the entry that is open. None without `attributes_of`. */
void attributes_tell(struct line *line, int fd);
/* Makes those of an open file exactly the given ones, where any were given; false with errno. ENOSYS: its file system keeps none. */
bool attributes_replace(int fd);

#endif
