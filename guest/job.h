/* One start under way, as the agent and the child that it starts see it. */
#ifndef HW_JOB_H
#define HW_JOB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "loop.h"
#include "spawn.h"
#include "user.h"

enum { STACK = 16384 };
enum stage { STAGE_NAMESPACE = 1, STAGE_USER, STAGE_CWD, STAGE_EXEC, STAGE_STDIO, STAGE_LIMITS };

struct report {
    int32_t stage, error;
};

/* One start under way. The child runs on its stack and reads its strings until it execs or ends: the report pipe is at
   end of file then, not before, and only then is this memory given back. */
struct job {
    struct watch report;
    struct proc *proc; /* NULL: forgotten meanwhile */
    struct job *next;
    uint32_t waiters[MAX_WAITERS];
    unsigned waiting;
    size_t octets;
    struct report said;
    size_t said_octets;

    char **argv, **envp;
    const char *path;  /* PATH, for a command without a slash */
    const char *cwd;
    bool cwd_is_home;
    bool terminal, switch_user, builtin;
    struct account account;
    uint64_t nofile[2], fsize[2]; /* as setrlimit takes them; 0: as they are */
    int in, out, err, report_end;
    char attempt[MAX_PATH];
    uint8_t stack[STACK] __attribute__((aligned(16)));
};

/* Runs in the child, on job->stack: becomes the process, or reports why not. */
void child_main(void *job);

#endif
