/* A tree that has all the memory it may have, nearly none of it the disk's, need not meet the kernel's memory killer: for as long
   as a page of a program can be dropped and read again there is "progress", of minutes. The kernel tells how long processes
   waited for memory; when they do little else, we do what the memory killer would have done. */
#include "pressure.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "agent.h"
#include "loop.h"
#include "proc.h"
#include "stream.h"

/* The kernel wakes us when somebody waited for 0.4 s within one; at most once in a window. */
static const char TRIGGER[] = "some 400000 1000000";
static const uint64_t SAME_SPELL_NS = 3000000000u; /* two wakings this near belong together */
enum { SINGLE_KILLS = 2 };                         /* of one spell; then the whole tree goes */

static void pressure_ready(struct watch *watch, uint32_t events);

static struct watch trigger = {.fd = -1, .ready = pressure_ready};
static int base_fd = -1;
static uint64_t last_ns;
static unsigned wakings, kills;

void pressure_watch(int fd)
{
    base_fd = fd;
    trigger.fd = openat(fd, "memory.pressure", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    if (trigger.fd < 0 || write(trigger.fd, TRIGGER, sizeof TRIGGER) < 0 || !watch_set(&trigger, EPOLLPRI)) {
        say("pressure of memory cannot be watched: %s", strerror(errno));
        watch_close(&trigger);
    }
}

static size_t read_file(int dir, const char *name, char *text, size_t room)
{
    int fd = openat(dir, name, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : read(fd, text, room - 1);
    if (fd >= 0)
        close(fd);
    text[n > 0 ? n : 0] = 0;
    return n > 0 ? (size_t)n : 0;
}

static uint64_t field(const char *text, const char *name)
{
    const char *found = strstr(text, name);
    return found ? strtoull(found + strlen(name), NULL, 10) : 0;
}

/* It has what it may have, and next to nothing of that can be given back. */
static bool starving(int group)
{
    char text[4096];
    uint64_t max = read_file(group, "memory.max", text, sizeof text) ? strtoull(text, NULL, 10) : 0; /* "max" is 0 */
    uint64_t now = read_file(group, "memory.current", text, sizeof text) ? strtoull(text, NULL, 10) : 0;
    if (max == 0 || now < max - max / 32)
        return false;
    read_file(group, "memory.stat", text, sizeof text);
    return field(text, "\nactive_file ") + field(text, "\ninactive_file ") < max / 12;
}

static unsigned long resident(pid_t pid)
{
    char path[32], text[128];
    unsigned long all, here = 0;
    snprintf(path, sizeof path, "/proc/%d/statm", (int)pid);
    if (!read_file(AT_FDCWD, path, text, sizeof text) || sscanf(text, "%lu %lu", &all, &here) != 2)
        return 0;
    return here;
}

/* The largest process right in a group; 0 when there is none. */
static pid_t largest_of(int group, unsigned long *size)
{
    char line[32];
    pid_t largest = 0;
    int fd = openat(group, "cgroup.procs", O_RDONLY | O_CLOEXEC);
    FILE *list = fd < 0 ? NULL : fdopen(fd, "r");
    if (!list) {
        if (fd >= 0)
            close(fd);
        return 0;
    }
    while (fgets(line, sizeof line, list)) {
        long pid = strtol(line, NULL, 10);
        unsigned long here = pid > 1 && pid <= INT_MAX ? resident((pid_t)pid) : 0;
        if (here > *size) {
            *size = here;
            largest = (pid_t)pid;
        }
    }
    fclose(list);
    return largest;
}

static bool has_group(const struct proc *proc)
{
    return proc->tree.cgroup_fd >= 0 && !proc->tree.shared;
}

static void kill_one(struct proc *proc, pid_t pid)
{
    if (kills++ < SINGLE_KILLS && pid > 0) {
        proc->killed_by_memory |= pid == proc->pid && !proc->wait_pending;
        kill(pid, SIGKILL);
    } else {
        proc->killed_by_memory |= !proc->wait_pending;
        tree_signal(&proc->tree, proc->pid, SIGKILL);
    }
    say("process %u had no memory left to run in: killed", proc->number);
}

void pressure_relieve(void)
{
    struct proc *proc, *worst = NULL;
    unsigned long size = 0;
    pid_t largest = 0;
    for (unsigned i = 0; (proc = proc_each(&i));) {
        if (has_group(proc) && starving(proc->tree.cgroup_fd)) {
            kill_one(proc, largest_of(proc->tree.cgroup_fd, &size));
            return;
        }
    }
    if (!starving(base_fd))
        return;
    for (unsigned i = 0; (proc = proc_each(&i));) { /* all of them together are */
        pid_t found = has_group(proc) ? largest_of(proc->tree.cgroup_fd, &size) : 0;
        if (found) {
            worst = proc;
            largest = found;
        }
    }
    if (worst)
        kill_one(worst, largest);
}

static void pressure_ready(struct watch *watch, uint32_t events)
{
    uint64_t now = now_ns();
    (void)watch;
    if (events & EPOLLERR) { /* the group is gone, by guest root */
        watch_close(&trigger);
        return;
    }
    if (now - last_ns > SAME_SPELL_NS)
        wakings = kills = 0;
    last_ns = now;
    if (++wakings > 1) /* a moment of it is nothing */
        pressure_relieve();
}
