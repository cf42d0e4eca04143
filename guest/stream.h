/* The streams of a process: its pipes or terminal on one side, its rings on the other. Used by the process table only. */
#ifndef HW_STREAM_H
#define HW_STREAM_H

#include "proc.h"

bool streams_open(void);
/* A turn of the loop is over. */
void streams_turn(void);
/* When streams_expire() has something to do (ns since boot); 0: never. */
uint64_t streams_deadline(void);
void streams_expire(void);
/* A child is about to be made, which inherits how the agent is scheduled. */
void streams_fork(void);
/* A new record: empty rings, no descriptors. */
void streams_prepare(struct proc *proc);
bool streams_connect(struct proc *proc, const struct proc_ends *ends);
/* Both outputs came to their end; of a connection also the input. */
bool streams_at_end(const struct proc *proc);
void streams_close(struct proc *proc);
void streams_drop(struct proc *proc);
void streams_resync(struct proc *proc);
/* No ring holds a chunk (with no process left it must be so). */
bool streams_idle(void);

/* Octets that may be sent now. */
uint64_t output_sendable(const struct output *output);
/* Octets that the process's pipe took. */
uint64_t input_taken(const struct proc *proc);
/* It runs: what its input's end had to wait for is there. */
void input_start(struct proc *proc);
/* Nothing more goes to the process. */
void input_close(struct proc *proc);

/* The table's side: the next process from a cursor that starts at 0; an output came to its end. */
struct proc *proc_each(unsigned *cursor);
void proc_stream_ended(struct proc *proc);

#endif
