/* Start-up as PID 1: mounts, modules, disks, the root of the processes, network, cgroups, the port. */
#ifndef HW_INIT_H
#define HW_INIT_H

/* Does all of it; gives the descriptor of the host's port. What fails is fatal(). */
int init_sandbox(void);
/* lo up; eth0, if it is there, with its address, route and name server. */
void init_network(void);

#endif
