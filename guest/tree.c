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
static int shared_fd = -1;
static int events_fd = -1;
static struct tree_limits usual;
static unsigned long known_kills; /* of the memory killer in all trees, when a tree was last put away */
static unsigned long shared_kills;
static unsigned next_name;
/* Making a cgroup costs more than all the rest of a start: empty ones are used again. */
static struct tree spare[SPARE];
static int spares;
static struct tree draining[DRAINING];
static int drainings;

void trees_use_cgroups(int fd, int shared, const struct tree_limits *limits)
{
    base_fd = fd;
    shared_fd = shared;
    usual = *limits;
    events_fd = openat(fd, "memory.events", O_RDONLY | O_CLOEXEC);
}

int trees_folder(void) { return base_fd; }

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

static uint64_t number_in(int dir, const char *file, const char *name)
{
    char text[1024];
    if (read_at(dir, file, text, sizeof text) <= 0)
        return 0;
    const char *found = strstr(text, name);
    return found ? strtoull(found + strlen(name), NULL, 10) : 0;
}

static int put_limit(int dir, const char *name, uint64_t limit)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)limit);
    return write_at(dir, name, text);
}

/* A bound of its own is as good as set or the start fails; the usual one guest root may have made impossible. */
static int put_limits(const struct tree *tree, const struct tree_limits *limits)
{
    int memory = 0, pids = 0;
    if (limits->memory || usual.memory)
        memory = put_limit(tree->cgroup_fd, "memory.max", limits->memory ? limits->memory : usual.memory);
    if (limits->pids || usual.pids)
        pids = put_limit(tree->cgroup_fd, "pids.max", limits->pids ? limits->pids : usual.pids);
    if (limits->memory && memory < 0)
        return memory;
    return limits->pids && pids < 0 ? pids : 0;
}

static int make(struct tree *tree)
{
    char name[16];
    for (int tries = 0; tries < 16; tries++) {
        tree->name = next_name++;
        snprintf(name, sizeof name, "%u", tree->name);
        if (mkdirat(base_fd, name, 0755) == 0) {
            tree->cgroup_fd = openat(base_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
            return tree->cgroup_fd < 0 ? -errno : put_limits(tree, &tree->limits);
        }
        if (errno != EEXIST)
            return -errno;
    }
    return -EEXIST;
}

static uint64_t lower(uint64_t asked, uint64_t bound)
{
    return asked && bound && asked >= bound ? 0 : asked;
}

int tree_take(struct tree *tree, const struct tree_limits *limits)
{
    *tree = (struct tree){.cgroup_fd = -1};
    if (base_fd < 0)
        return 0;
    tree->limits = (struct tree_limits){lower(limits->memory, usual.memory), lower(limits->pids, usual.pids)};
    tree->kills = known_kills;
    /* What a used one holds of the disk would have to go before its bound could be lowered, and we would wait for it. */
    if (spares == 0 || tree->limits.memory)
        return make(tree);
    spares--;
    tree->cgroup_fd = spare[spares].cgroup_fd;
    tree->name = spare[spares].name;
    return tree->limits.pids ? put_limits(tree, &tree->limits) : 0;
}

void tree_share(struct tree *tree)
{
    *tree = (struct tree){.cgroup_fd = shared_fd, .shared = true};
}

int tree_renew(struct tree *tree)
{
    if (tree->cgroup_fd < 0 || tree->shared)
        return -ENOENT;
    discard(tree);
    while (spares > 0)
        discard(&spare[--spares]);
    return make(tree);
}

enum population { INHABITED, EMPTY, GONE };

/* Whether somebody is in it, or guest root removed it. */
static enum population population(const struct tree *tree)
{
    char text[256];
    if (read_at(tree->cgroup_fd, "cgroup.events", text, sizeof text) < 0)
        return GONE;
    return strstr(text, "populated 0") ? EMPTY : INHABITED;
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
    if (tree->shared)
        return leader <= 1 ? -ESRCH : kill(leader, signal) == 0 ? 0 : -errno;
    if (tree->cgroup_fd >= 0) {
        if (signal == SIGKILL)
            return population(tree) != INHABITED ? -ESRCH : write_at(tree->cgroup_fd, "cgroup.kill", "1");
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

bool tree_lives(const struct tree *tree, pid_t leader)
{
    if (tree->shared)
        return leader > 1;
    if (tree->cgroup_fd >= 0)
        return population(tree) == INHABITED;
    return leader > 1 && base_fd < 0 && signal_session(leader, 0) > 0;
}

void trees_kill_descendants(void)
{
    for (int round = 0; round < 8 && signal_session(0, SIGKILL) > 0; round++)
        ;
}

static unsigned long all_kills(void)
{
    char text[512];
    ssize_t n = events_fd < 0 ? 0 : pread(events_fd, text, sizeof text - 1, 0);
    text[n > 0 ? n : 0] = 0;
    const char *found = strstr(text, "oom_kill ");
    return found ? strtoul(found + 9, NULL, 10) : 0;
}

/* One in which the memory killer may have been is not used again: its count would be held against the next. Nor one that what its
   processes left in memory (files in /dev/shm) takes half of. */
static bool like_new(const struct tree *tree)
{
    static const struct tree_limits none;
    known_kills = all_kills();
    if (known_kills != tree->kills)
        return false;
    if (usual.memory && number_in(tree->cgroup_fd, "memory.current", "") > usual.memory / 2)
        return false;
    return (!tree->limits.memory && !tree->limits.pids) || put_limits(tree, &none) == 0;
}

static void put_away(struct tree *tree, enum population found)
{
    if (found == EMPTY && spares < SPARE && like_new(tree))
        spare[spares++] = *tree;
    else
        discard(tree);
    tree->cgroup_fd = -1;
}

void tree_release(struct tree *tree, pid_t leader)
{
    if (tree->shared) {
        if (leader > 1)
            kill(leader, SIGKILL);
        *tree = (struct tree){.cgroup_fd = -1};
        return;
    }
    if (tree->cgroup_fd < 0) {
        if (base_fd < 0)
            tree_signal(tree, leader, SIGKILL);
        return;
    }
    enum population found = population(tree);
    if (found != INHABITED) {
        put_away(tree, found);
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
        enum population found = population(&draining[i]);
        if (found != INHABITED) {
            put_away(&draining[i], found);
            draining[i] = draining[--drainings];
        } else {
            i++;
        }
    }
}

bool tree_oom(const struct tree *tree)
{
    if (tree->cgroup_fd < 0)
        return false;
    unsigned long kills = number_in(tree->cgroup_fd, "memory.events", "oom_kill ");
    if (!tree->shared)
        return kills > 0; /* it was new, or like new */
    bool more = kills != shared_kills;
    shared_kills = kills;
    return more;
}

/* The CPU time of every process of a session that is ours, and of what each waited for. */
static uint64_t session_cpu_us(pid_t session)
{
    uint64_t tick_us = 1000000u / (uint64_t)sysconf(_SC_CLK_TCK), ticks = 0;
    DIR *dir = opendir("/proc");
    struct dirent *entry;
    while (dir && (entry = readdir(dir))) {
        char *end, text[512], path[32];
        long pid = strtol(entry->d_name, &end, 10);
        unsigned long user, system;
        long child_user, child_system;
        struct identity of;
        if (*end || pid <= 1 || !identify(dirfd(dir), pid, &of) || of.session != session)
            continue;
        snprintf(path, sizeof path, "%ld/stat", pid);
        char *rest = read_at(dirfd(dir), path, text, sizeof text) > 0 ? strrchr(text, ')') : NULL;
        if (rest && sscanf(rest + 1, " %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu %ld %ld", &user, &system, &child_user,
                           &child_system) == 4)
            ticks += user + system + (unsigned long)child_user + (unsigned long)child_system;
    }
    if (dir)
        closedir(dir);
    return ticks * tick_us;
}

uint64_t tree_cpu_us(const struct tree *tree, pid_t leader)
{
    if (tree->cgroup_fd >= 0)
        return number_in(tree->cgroup_fd, "cpu.stat", "usage_usec ");
    return leader > 1 ? session_cpu_us(leader) : 0;
}

unsigned trees_tasks(void)
{
    char text[64];
    if (base_fd >= 0)
        return (unsigned)number_in(base_fd, "pids.current", "");
    const char *tasks = read_at(AT_FDCWD, "/proc/loadavg", text, sizeof text) > 0 ? strchr(text, '/') : NULL;
    return tasks ? (unsigned)strtoul(tasks + 1, NULL, 10) : 0;
}
