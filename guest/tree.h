/* The tree of a process: all that it started, whoever its parent is now. In a sandbox a cgroup, on a host its session. */
#ifndef HW_TREE_H
#define HW_TREE_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

/* What a tree may take; 0: the sandbox's usual bound. */
struct tree_limits {
    uint64_t memory; /* octets */
    uint64_t pids;
};

struct tree {
    int cgroup_fd; /* the folder, for CLONE_INTO_CGROUP; -1 without cgroups */
    unsigned name;
    bool shared;   /* the one cgroup of the builtin programs: the tree is its leader, which starts nothing */
    unsigned long kills; /* of the memory killer in all trees, when it was taken */
    struct tree_limits limits;
};

/* Without cgroups trees are sessions. Called once, by init: the folders /sys/fs/cgroup/hw and /sys/fs/cgroup/builtin, and what
   each tree may take by default, so that the next one finds room. */
void trees_use_cgroups(int base_fd, int shared_fd, const struct tree_limits *usual);

/* The folder of all trees, or -1. */
int trees_folder(void);
/* A tree for one process that is to be started; 0 or -errno. Without cgroups limits are not enforced. */
int tree_take(struct tree *tree, const struct tree_limits *limits);
/* The builtin programs' own. */
void tree_share(struct tree *tree);
/* Takes a new cgroup in place of one that does not work (guest root may have removed it); 0 or -errno. */
int tree_renew(struct tree *tree);
/* Signals all of it; the leader's pid is its session. 0 or -errno (-ESRCH: nobody is left). */
int tree_signal(struct tree *tree, pid_t leader, int signal);
/* Somebody of it is there, the leader aside when it was reaped. */
bool tree_lives(const struct tree *tree, pid_t leader);
/* Kills what is left and gives the cgroup back when it is empty. */
void tree_release(struct tree *tree, pid_t leader);
/* Without cgroups: kills everything that descends from us, also what left its session. */
void trees_kill_descendants(void);
/* Children ended: cgroups that were not empty at their release may be now. */
void trees_drain(void);
/* The memory killer took a process of this tree. */
bool tree_oom(const struct tree *tree);
/* Microseconds of CPU time that it took so far (a cgroup that was used before counts on). */
uint64_t tree_cpu_us(const struct tree *tree, pid_t leader);
/* Processes and threads in all trees; without cgroups of the machine. */
unsigned trees_tasks(void);

#endif
