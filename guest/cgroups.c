/* What the sandbox's processes may take of the machine. The order of who gets what when it is scarce: the kernel and the agent
   (outside of all bounds, first served), then the builtin programs (a small group of their own), then everything that users
   start (`hw`), where no session gets so much that the next one could not start. */
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <unistd.h>

#include "agent.h"
#include "init.h"
#include "power.h"
#include "proto.h"
#include "tree.h"

#define ROOT "/sys/fs/cgroup"

enum {
    AGENT_KIB_MIN = 12 << 10,
    AGENT_KIB_MAX = 48 << 10, /* its buffers full, and what the kernel does for it */
    AGENT_PIDS = 64,
    BUILTIN_PIDS = 2 * MAX_BUILTINS,
    SESSION_PIDS_MIN = 256,
    SPARE_KIB_MIN = 8 << 10,
};

static bool put(const char *path, const char *text)
{
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    bool fine = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (!fine)
        say("%s: %s", path, strerror(errno));
    if (fd >= 0)
        close(fd);
    return fine;
}

static void put_number(const char *path, unsigned long long number)
{
    char text[32];
    snprintf(text, sizeof text, "%llu", number);
    put(path, text);
}

static unsigned long long number_in(const char *path, const char *name)
{
    char text[4096];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    const char *found = strstr(text, name);
    return found ? strtoull(found + strlen(name), NULL, 10) : 0;
}

static int make_group(const char *path)
{
    make_folder(path, 0755);
    int fd = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        fatal("%s: %s", path, strerror(errno));
    return fd;
}

static void delegate(const char *path)
{
    static const char *const controllers[] = {"+cpu", "+memory", "+pids"};
    for (size_t i = 0; i < sizeof controllers / sizeof controllers[0]; i++)
        put(path, controllers[i]);
}

/* Bounds of the kernel that one user could use up for all, where the groups bound the memory behind them anyway; and memory that
   would outlive the processes that took it, which no memory killer could get back. */
static void open_shared_bounds(void)
{
    struct rlimit unlimited = {RLIM_INFINITY, RLIM_INFINITY};
    put("/proc/sys/fs/file-max", "9223372036854775807");
    put("/proc/sys/kernel/shm_rmid_forced", "1");
    put("/proc/sys/kernel/msgmni", "256");
    put("/proc/sys/kernel/sem", "250\t32000\t32\t128");
    if (setrlimit(RLIMIT_NPROC, &unlimited) != 0)
        say("processes per user: %s", strerror(errno));
}

void init_cgroups(void)
{
    must_mount("cgroup2", ROOT, "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    delegate(ROOT "/cgroup.subtree_control");
    int hw = make_group(ROOT "/hw");
    int builtin = make_group(ROOT "/builtin");
    delegate(ROOT "/hw/cgroup.subtree_control");
    open_shared_bounds();

    /* What is there to give: the kernel and its modules have taken theirs already. */
    unsigned long long memory = number_in("/proc/meminfo", "MemAvailable:");
    unsigned long long agent_kib = memory / 8;
    if (agent_kib < AGENT_KIB_MIN)
        agent_kib = AGENT_KIB_MIN;
    if (agent_kib > AGENT_KIB_MAX)
        agent_kib = AGENT_KIB_MAX;
    unsigned long long threads = number_in("/proc/sys/kernel/threads-max", "");
    unsigned long long pids = number_in("/proc/sys/kernel/pid_max", "");
    if (threads < pids)
        pids = threads;
    struct tree_limits session = {0, 0};
    if (memory > 3 * agent_kib) {
        unsigned long long users = memory - agent_kib;
        unsigned long long spare = users / 8 > SPARE_KIB_MIN ? users / 8 : SPARE_KIB_MIN;
        put_number(ROOT "/hw/memory.max", users << 10);
        put_number(ROOT "/builtin/memory.max", agent_kib << 10);
        session.memory = (users - spare) << 10;
    }
    if (pids > 4 * (AGENT_PIDS + BUILTIN_PIDS)) {
        unsigned long long users = pids - AGENT_PIDS - BUILTIN_PIDS;
        put_number(ROOT "/hw/pids.max", users);
        put_number(ROOT "/builtin/pids.max", BUILTIN_PIDS);
        session.pids = users / 4 > SESSION_PIDS_MIN ? users / 4 : SESSION_PIDS_MIN;
    }
    trees_use_cgroups(hw, builtin, &session);
    say("cgroups: a session may take %llu KiB and %llu processes", (unsigned long long)session.memory >> 10,
        (unsigned long long)session.pids);
}
