/* Accounts, as the sandbox's /etc/passwd and /etc/group have them. */
#ifndef HW_USER_H
#define HW_USER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto.h"

struct account {
    uint32_t uid, gid;
    char name[MAX_KEY + 1], home[256], shell[256];
    uint32_t groups[MAX_GROUPS];
    int group_count;
};

/* Finds a name or a decimal uid in the text of the two files (a decimal uid need not be there). False: no such user. */
bool account_find(const char *user, const char *passwd, size_t passwd_length, const char *group, size_t group_length,
                  struct account *account);
/* The same in the sandbox's files; 0 or -errno (-ENOENT: no such user). */
int account_lookup(const char *user, struct account *account);

#endif
