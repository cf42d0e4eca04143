/* On whose behalf root works: who owns what is made, and whose home a relative path starts at. */
#ifndef HW_FILES_OWNER_H
#define HW_FILES_OWNER_H

#include <stdbool.h>

/* Takes the argument `owner`, where there is one: goes to its home. ESRCH: no such user; EPERM: whoever runs is not root. */
void owner_take(void);
bool owner_there(void);
/* Gives away what was just made; true where there is no owner to give it to. False with errno. */
bool owner_give(int fd);
bool owner_give_at(int folder, const char *name);

#endif
