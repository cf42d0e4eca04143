/* The tree of a process: all that it started, whoever its parent is now. In a sandbox a cgroup, on a host its session. */
#ifndef HW_TREE_H
#define HW_TREE_H

#include <stdbool.h>
#include <sys/types.h>

struct tree {
    int cgroup_fd; /* the folder, for CLONE_INTO_CGROUP; -1 without cgroups */
    unsigned name;
};

/* Without cgroups trees are sessions. Called once, by init: base_fd is the folder /sys/fs/cgroup/hw. */
void trees_use_cgroups(int base_fd);

/* A tree for one process that is to be started; 0 or -errno. */
int tree_take(struct tree *tree);
/* Takes a new cgroup in place of one that does not work (guest root may have removed it); 0 or -errno. */
int tree_renew(struct tree *tree);
/* Signals all of it; the leader's pid is its session. 0 or -errno (-ESRCH: nobody is left). */
int tree_signal(struct tree *tree, pid_t leader, int signal);
/* Kills what is left and gives the cgroup back when it is empty. */
void tree_release(struct tree *tree, pid_t leader);
/* Without cgroups: kills everything that descends from us, also what left its session. */
void trees_kill_descendants(void);
/* Children ended: cgroups that were not empty at their release may be now. */
void trees_drain(void);
/* Kills on account of memory in all trees so far. */
unsigned long trees_oom_kills(void);

#endif
