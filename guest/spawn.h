/* Starting processes. A start never blocks the agent: the child shares the agent's memory until its exec, and says through a
   close-on-exec pipe how it went. A program on a file system that hangs holds up its own start only. */
#ifndef HW_SPAWN_H
#define HW_SPAWN_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "fields.h"
#include "proc.h"

struct spawn_request {
    const char *const *env_base; /* the sandbox's environment, NULL-ended */
    const uint8_t *payload;      /* the fields; ARG and ENV are read out of it */
    size_t length;
    struct field name;   /* the first ARG */
    unsigned args, envs; /* how many of them there are */
    size_t string_bytes;
    char cwd[MAX_PATH];
    char user[MAX_KEY + 1];
    bool has_cwd, has_user;
    uint32_t flags, rows, cols;
    uint64_t timeout_ms;
    struct tree_limits limits;
    uint64_t cpu_ms, nofile, fsize; /* 0: no limit of its own */
};

/* Starts it, or fails its record. 0, or -errno with a message in proc->message when not even a record should be (a bound). */
int spawn_start(struct proc *proc, const struct spawn_request *request);

/* Somebody waits for the answer to a SPAWN of a process that is starting; false: too many do. */
bool spawn_wait(struct proc *proc, uint32_t request_id);
/* A HELLO came: nobody waits any more. */
void spawn_forget_waiters(void);
/* Sees whether the start is over (the child ended: it must be). */
void spawn_check(struct job *job);
/* The process of this start is forgotten; its memory lives until the child is gone. */
void spawn_detach(struct job *job);
unsigned spawns_waiting(void);
/* A round of events is over: memory of starts that are over is given back. */
void spawns_sweep(void);

#endif
