/* Programs inside the agent's own binary: what the host needs in a sandbox must not depend on what its template has. They are
   run like any other process, by name (SPAWN with the flag BUILTIN). */
#ifndef HW_BUILTIN_H
#define HW_BUILTIN_H

#include <stdbool.h>
#include <stddef.h>

typedef int builtin_main(int argc, char **argv);

/* The program of a name (not NUL-ended), or NULL. */
builtin_main *builtin_find(const char *name, size_t length);
/* Whether what it leaves behind may lie in memory (a file on a tmpfs), which is charged to whoever wrote it, for as long as it is there: such a
   program belongs to those who have bounds for that, not to the small group of the others. */
bool builtin_fills(char *const *argv);

#endif
