/* Start-up as PID 1: mounts, modules, disks, the root of the processes, network, cgroups, the host's channel. */
#ifndef HW_INIT_H
#define HW_INIT_H

/* Does all of it; gives the descriptor of the host's port, or with agent.vsock the socket that it connects to. What fails is fatal(). */
int init_sandbox(void);

/* Its parts, in their own files. */
void init_disks(void);   /* finds base and upper by content and mounts them and the overlay at /hw/root */
void init_root(void);    /* what belongs into the root of the processes, and their mount namespace */
void init_cgroups(void); /* /sys/fs/cgroup/hw with its bounds */
void init_network(void); /* lo up; eth0, if it is there, with its address and route */

/* mkdir -p for one level; fatal() when it cannot be made. */
void make_folder(const char *path, unsigned mode);
void must_mount(const char *source, const char *target, const char *type, unsigned long flags, const char *options);
void wait_a_little(void);

#endif
