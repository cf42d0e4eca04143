#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <unistd.h>

#include "agent.h"
#include "init.h"
#include "power.h"
#include "tree.h"

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

void init_cgroups(void)
{
    enum { AGENT_KIB = 16 << 10, AGENT_PIDS = 64 };
    static const char *const controllers[] = {"+cpu", "+memory", "+pids"};
    char text[32];
    must_mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL);
    for (size_t i = 0; i < sizeof controllers / sizeof controllers[0]; i++)
        put("/sys/fs/cgroup/cgroup.subtree_control", controllers[i]);
    make_folder("/sys/fs/cgroup/hw", 0755);
    unsigned long long memory = number_in("/proc/meminfo", "MemTotal:");
    unsigned long long threads = number_in("/proc/sys/kernel/threads-max", "");
    unsigned long long pids = number_in("/proc/sys/kernel/pid_max", "");
    if (threads < pids)
        pids = threads;
    if (memory > 2 * AGENT_KIB) {
        snprintf(text, sizeof text, "%llu", (memory - AGENT_KIB) << 10);
        put("/sys/fs/cgroup/hw/memory.max", text);
    }
    if (pids > 2 * AGENT_PIDS) {
        snprintf(text, sizeof text, "%llu", pids - AGENT_PIDS);
        put("/sys/fs/cgroup/hw/pids.max", text);
    }
    int fd = open("/sys/fs/cgroup/hw", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        fatal("/sys/fs/cgroup/hw: %s", strerror(errno));
    trees_use_cgroups(fd);
    say("cgroups: memory %llu KiB, %llu processes for the sandbox", memory - AGENT_KIB, pids - AGENT_PIDS);
}
