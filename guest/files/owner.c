#include "owner.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "../user.h"
#include "args.h"
#include "entry.h"
#include "say.h"

static struct account owner;
static bool there;

void owner_take(void)
{
    const char *name = args_text("owner"), *accounts = passwd_text();
    if (!name)
        return;
    if (geteuid() != 0)
        fail(EPERM, "only root works on behalf of an owner");
    if (!account_find(name, accounts, strlen(accounts), "", 0, &owner))
        fail(ESRCH, "no such user: %.64s", name);
    there = true;
    if (chdir(owner.home) != 0 && chdir("/") != 0)
        fail(errno, "the home of %.64s cannot be entered: %s", name, strerror(errno));
}

bool owner_there(void)
{
    return there;
}

bool owner_give(int fd)
{
    return !there || fchown(fd, owner.uid, owner.gid) == 0;
}

bool owner_give_at(int folder, const char *name)
{
    return !there || fchownat(folder, name, owner.uid, owner.gid, AT_SYMLINK_NOFOLLOW) == 0;
}
