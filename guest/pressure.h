/* Sessions that come to the end of their memory without the kernel's memory killer noticing. */
#ifndef HW_PRESSURE_H
#define HW_PRESSURE_H

/* Watches what the sandbox's processes wait for memory; base_fd is the folder /sys/fs/cgroup/hw. */
void pressure_watch(int base_fd);
/* Kills the largest process of a tree that has no memory left to run in (after two of one spell the tree), if there is one. */
void pressure_relieve(void);

#endif
