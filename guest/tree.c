#include "tree.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "proto.h"

enum { SPARE = 8, DRAINING = 2 * MAX_PROCS };

static int base_fd = -1;
static int events_fd = -1;
static unsigned next_name;
/* Making a cgroup costs more than all the rest of a start: empty ones are used again. */
static struct tree spare[SPARE];
static int spares;
static struct tree draining[DRAINING];
static int drainings;

void trees_use_cgroups(int fd)
{
    base_fd = fd;
    events_fd = openat(fd, "memory.events", O_RDONLY | O_CLOEXEC);
}

static int write_at(int dir, const char *name, const char *text)
{
    int fd = openat(dir, name, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    ssize_t n = write(fd, text, strlen(text));
    int error = n < 0 ? -errno : 0;
    close(fd);
    return error;
}

static ssize_t read_at(int dir, const char *name, char *to, size_t room)
{
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -errno;
    size_t have = 0;
    ssize_t n;
    while (have < room - 1 && (n = read(fd, to + have, room - 1 - have)) > 0)
        have += (size_t)n;
    close(fd);
    to[have] = 0;
    return (ssize_t)have;
}

static void discard(struct tree *tree)
{
    char name[16];
    snprintf(name, sizeof name, "%u", tree->name);
    close(tree->cgroup_fd);
    tree->cgroup_fd = -1;
    unlinkat(base_fd, name, AT_REMOVEDIR);
}

static int make(struct tree *tree)
{
    char name[16];
    for (int tries = 0; tries < 16; tries++) {
        tree->name = next_name++;
        snprintf(name, sizeof name, "%u", tree->name);
        if (mkdirat(base_fd, name, 0755) == 0) {
            tree->cgroup_fd = openat(base_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            return tree->cgroup_fd < 0 ? -errno : 0;
        }
        if (errno != EEXIST)
            return -errno;
    }
    return -EEXIST;
}

int tree_take(struct tree *tree)
{
    *tree = (struct tree){.cgroup_fd = -1};
    if (base_fd < 0)
        return 0;
    if (spares > 0) {
        *tree = spare[--spares];
        return 0;
    }
    return make(tree);
}

int tree_renew(struct tree *tree)
{
    if (tree->cgroup_fd < 0)
        return -ENOENT;
    discard(tree);
    while (spares > 0)
        discard(&spare[--spares]);
    return make(tree);
}

static bool empty(const struct tree *tree)
{
    char text[256];
    return read_at(tree->cgroup_fd, "cgroup.events", text, sizeof text) > 0 && strstr(text, "populated 0");
}

static int signal_cgroup(int fd, int signal)
{
    char text[4096];
    size_t have = 0;
    ssize_t n;
    int found = 0;
    int procs = openat(fd, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    if (procs < 0)
        return -errno;
    while ((n = read(procs, text + have, sizeof text - 1 - have)) > 0) {
        have += (size_t)n;
        text[have] = 0;
        char *at = text, *end;
        for (; (end = strchr(at, '\n')); at = end + 1) {
            long pid = strtol(at, NULL, 10);
            if (pid > 1 && pid <= INT_MAX && kill((pid_t)pid, signal) == 0)
                found++;
        }
        have -= (size_t)(at - text);
        memmove(text, at, have); /* the first half of a number is another's */
    }
    close(procs);
    return found ? 0 : -ESRCH;
}

struct identity {
    char state;
    int parent, group, session;
};

static bool identify(int proc_fd, long pid, struct identity *of)
{
    char text[512];
    char path[32];
    snprintf(path, sizeof path, "%ld/stat", pid);
    if (read_at(proc_fd, path, text, sizeof text) <= 0)
        return false;
    char *rest = strrchr(text, ')');
    return rest && sscanf(rest + 1, " %c %d %d %d", &of->state, &of->parent, &of->group, &of->session) == 4;
}

/* Everything that we started descends from us, as its reaper. A number that was used again belongs to somebody else. */
static bool is_ours(int proc_fd, struct identity of)
{
    for (int depth = 0; depth < 256 && of.parent > 1; depth++) {
        if (of.parent == getpid())
            return true;
        if (!identify(proc_fd, of.parent, &of))
            return false;
    }
    return false;
}

/* Signals every process of a session or process group (0: of any) that is ours; how many there were. */
static int signal_session(pid_t session, int signal)
{
    DIR *dir = opendir("/proc");
    if (!dir)
        return 0;
    int found = 0;
    struct dirent *entry;
    while ((entry = readdir(dir))) {
        char *end;
        long pid = strtol(entry->d_name, &end, 10);
        if (*end || pid <= 1)
            continue;
        struct identity of;
        if (!identify(dirfd(dir), pid, &of) || (session && of.session != session && of.group != session) || of.state == 'Z')
            continue;
        if (is_ours(dirfd(dir), of) && kill((pid_t)pid, signal) == 0)
            found++;
    }
    closedir(dir);
    return found;
}

int tree_signal(struct tree *tree, pid_t leader, int signal)
{
    if (tree->cgroup_fd >= 0) {
        if (signal == SIGKILL)
            return empty(tree) ? -ESRCH : write_at(tree->cgroup_fd, "cgroup.kill", "1");
        return signal_cgroup(tree->cgroup_fd, signal);
    }
    if (leader <= 1)
        return -ESRCH;
    int found = signal_session(leader, signal);
    if (signal == SIGKILL) /* whoever was forking meanwhile left a child that the first round did not see */
        for (int round = 0; round < 8 && signal_session(leader, signal) > 0; round++)
            ;
    return found ? 0 : -ESRCH;
}

void trees_kill_descendants(void)
{
    for (int round = 0; round < 8 && signal_session(0, SIGKILL) > 0; round++)
        ;
}

static void put_away(struct tree *tree)
{
    if (spares < SPARE)
        spare[spares++] = *tree;
    else
        discard(tree);
    tree->cgroup_fd = -1;
}

void tree_release(struct tree *tree, pid_t leader)
{
    if (tree->cgroup_fd < 0) {
        if (base_fd < 0)
            tree_signal(tree, leader, SIGKILL);
        return;
    }
    if (empty(tree)) {
        put_away(tree);
        return;
    }
    write_at(tree->cgroup_fd, "cgroup.kill", "1");
    if (drainings < DRAINING) {
        draining[drainings++] = *tree;
        tree->cgroup_fd = -1;
    } else {
        discard(tree); /* its folder stays until the guest ends; the processes are dead */
    }
}

void trees_drain(void)
{
    for (int i = 0; i < drainings;) {
        if (empty(&draining[i])) {
            put_away(&draining[i]);
            draining[i] = draining[--drainings];
        } else {
            i++;
        }
    }
}

unsigned long trees_oom_kills(void)
{
    char text[512];
    if (events_fd < 0)
        return 0;
    ssize_t n = pread(events_fd, text, sizeof text - 1, 0);
    if (n <= 0)
        return 0;
    text[n] = 0;
    const char *found = strstr(text, "oom_kill ");
    return found ? strtoul(found + 9, NULL, 10) : 0;
}
