/* The arguments of one run: KEY=VALUE, each at most once. What is wrong with them ends the run with EINVAL. */
#ifndef HW_FILES_ARGS_H
#define HW_FILES_ARGS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* Takes what stands behind the OP. `known` are the operation's keys, parted by spaces. */
void args_parse(int argc, char **argv, const char *known);

bool args_has(const char *key);
/* A path: not empty, and short enough to be said as an absolute one; it must be there. */
const char *args_path(const char *key);
/* A value as it is, or NULL. */
const char *args_text(const char *key);
uint64_t args_number(const char *key, uint64_t otherwise, uint64_t least, uint64_t most);
bool args_flag(const char *key);
/* Octal digits, at most 07777. */
mode_t args_mode(const char *key, mode_t otherwise);

#endif
