/* What every part of the agent shares: how it runs, and where the sandbox is. */
#ifndef HW_AGENT_H
#define HW_AGENT_H

#include <stdbool.h>

struct agent {
    bool host_mode;   /* a process on the host, for tests: no mounts, no cgroups, nothing of the host is changed */
    int root_fd;      /* the root that the processes see */
    int mount_ns_fd;  /* their mount namespace, or -1 */
    int upper_fd;     /* the writable file system, or -1 */
    int null_fd;      /* /dev/null */
    int random_fd;    /* /dev/urandom, or -1 */
    bool vsock;       /* the channel is a vsock, so the monitor is one that ends when the machine resets itself and cannot power it off */
    int self_fd;      /* the agent's own binary, for its builtin programs */
    char upper_dev[32];
    char boot_id[40];
};

extern struct agent agent;

/* One line on the console. */
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Opens a path of the sandbox so that no link in it leads out of the sandbox's root and no FIFO blocks; fd or -errno. */
int open_in_root(const char *path, int flags, unsigned mode);

#endif
