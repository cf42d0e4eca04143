/* The process table: every process that the host asked for, its streams and how it ended. */
#ifndef HW_PROC_H
#define HW_PROC_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/types.h>

#include "loop.h"
#include "proto.h"
#include "ring.h"
#include "tree.h"

struct job;

/* What a place of the table is for; each has its own number of them. */
enum proc_kind { KIND_PROCESS, KIND_BUILTIN, KIND_CONNECTION, KINDS };

/* One output stream: what the process wrote from ring.base on, sent up to `sent`, may be sent up to `limit`. */
struct output {
    struct watch watch;
    struct ring ring;
    bool credit; /* the host acknowledged in this connection */
    bool starved;
    bool large; /* its pipe was made larger */
    uint64_t sent, limit;
};

struct input {
    bool large;         /* its pipe was made larger */
    struct watch watch; /* fd -1: closed, everything is thrown away and acknowledged */
    struct ring ring;
    uint64_t next;  /* the next octet that is expected */
    uint32_t grant; /* octets past what was taken that are buffered */
    bool eof;       /* no more will come */
    bool mid_line;  /* a terminal got octets since the last end of a line */
    bool ack_due;
};

/* A connection that is being made. */
struct dialling {
    uint32_t waiters[MAX_WAITERS]; /* requests */
    uint8_t waiting;
    bool again;    /* refused at 127.0.0.1, ::1 is to be tried */
    uint16_t port;
    int error;     /* it failed, and nobody was there to be told */
};

struct proc {
    uint32_t number; /* 0: the slot is free */
    uint8_t kind;    /* enum proc_kind */
    uint8_t state;   /* enum proc_state */
    uint8_t reason;
    bool pty;
    bool killed_by_timeout, killed_by_us; /* by SIGNAL: not by the memory killer */
    bool timeout_leader;   /* the deadline is the leader's alone */
    bool killed_by_memory; /* we were quicker than the memory killer */
    bool dirty;            /* a PROC frame is due */
    bool resync;           /* the PROC frame of the list after HELLO_ACK is due */
    uint8_t told;          /* the last state that was sent */
    bool wait_pending;     /* the leader was reaped, but not yet told (it ended before its exec was seen) */
    pid_t pid;
    int exit_code, exit_signal;
    uint64_t started_ns, ended_ns, deadline_ns;
    uint64_t utime_us, stime_us, maxrss_kib;
    struct tree tree;
    struct job *job; /* while STATE_STARTING */
    uint64_t cpu_limit_us, cpu_check_ns; /* of its tree; when it is looked at next; 0: no limit */
    struct dialling dialling;            /* a connection */
    struct output out[2];
    struct input in;
    char key[MAX_KEY + 1];
    char message[MAX_MESSAGE];
};

/* What a new process gets, already open. The table takes the descriptors over. */
struct proc_ends {
    int in, out, err; /* -1: none */
    bool pty;
};

bool procs_open(void);

struct proc *proc_by_number(uint32_t number);
struct proc *proc_by_key(const char *key);
/* A free slot with its number and key, in STATE_STARTING; NULL when as many of its kind are known as may be. */
struct proc *proc_new(uint32_t number, const char *key, enum proc_kind kind);
/* Takes the ends of its streams; false when the kernel cannot watch them. */
bool proc_connect(struct proc *proc, const struct proc_ends *ends);
/* When its tree is to be killed (CLOCK_MONOTONIC; 0: never), also while it is still starting. */
void proc_set_deadline(struct proc *proc, uint64_t deadline);
/* How much CPU time its tree may take; the tree must be there. */
void proc_set_cpu_limit(struct proc *proc, uint64_t microseconds);
/* The exec succeeded. */
void proc_running(struct proc *proc);
/* The process could not be started; the record says why. */
void proc_failed(struct proc *proc, const char *message);
/* The connection broke (with an errno), or the other side will send no more (0). */
void proc_connection_ended(struct proc *proc, int error);
/* Something of its tree lives: the leader, or what outlived it. */
bool proc_lives(const struct proc *proc);
/* Kills its tree, resets its connection, and forgets it. */
void proc_forget(struct proc *proc);
void procs_kill_all(int signal);
/* Processes whose leader is not reaped yet. */
unsigned procs_alive(void);

int proc_signal(struct proc *proc, int signal, uint32_t scope);
int proc_resize(struct proc *proc, uint32_t rows, uint32_t cols);
void proc_input(struct proc *proc, uint64_t offset, const uint8_t *data, size_t count, bool eof);
void proc_output_ack(struct proc *proc, const uint64_t *stdout_ack, const uint64_t *stderr_ack, const uint64_t *limit);

/* A HELLO came: all credit is forgotten and every process is listed again. */
void procs_resync(void);

/* What is due to be sent; each returns NULL when nothing is. */
struct proc *procs_next_resync(void);
struct proc *procs_next_dirty(void);
struct proc *procs_next_input_ack(void);
struct output *procs_next_output(struct proc **proc, int *fd);

/* Writes the payload of a PROC frame for a state at most `state`; returns its length. */
size_t proc_describe(const struct proc *proc, uint8_t state, uint8_t *to, size_t room);

/* Takes what ended, within a bound for each call. */
void procs_reap(void);
/* The bound was reached: there may be more of them. Takes them. */
bool procs_reap_pending(void);
uint64_t procs_deadline(void);
void procs_expire(void);

#endif
