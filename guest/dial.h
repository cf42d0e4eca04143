/* TCP connections to ports inside the sandbox, for the host: places of the process table without a process. */
#ifndef HW_DIAL_H
#define HW_DIAL_H

#include <stddef.h>
#include <stdint.h>

#include "proc.h"

/* DIAL: begins to connect; the answer comes when it is known how that went. */
void dial_request(uint32_t request, const uint8_t *payload, size_t length);
/* A HELLO came: nobody waits any more. */
void dials_forget_waiters(void);
/* Its time to connect is over. */
void dial_expire(struct proc *proc);
/* It is about to be forgotten: whoever waits for it hears so, and the other side sees a reset unless both were done. */
void dial_drop(struct proc *proc);

#endif
