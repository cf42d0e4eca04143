/* The one epoll loop: watched descriptors, child processes that end, deadlines. */
#ifndef HW_LOOP_H
#define HW_LOOP_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/epoll.h>

struct watch {
    int fd;          /* -1: closed */
    uint32_t events; /* what epoll was asked for; 0: not registered */
    void (*ready)(struct watch *watch, uint32_t events);
    void *owner;
};

/* False with errno when epoll or the signal descriptor cannot be had. */
bool loop_open(void);

/* Registers, changes or (0) removes what is waited for. A full pipe must be removed, not only masked: the kernel reports a
   hang-up whatever was asked for. False when the kernel has no memory for it. */
bool watch_set(struct watch *watch, uint32_t events);
void watch_close(struct watch *watch);

/* Runs until loop_stop(). */
void loop_run(void);
/* One round of it that waits at most so long (-1: for ever). */
void loop_turn(int timeout_ms);
void loop_stop(void);

uint64_t now_ns(void);  /* CLOCK_MONOTONIC */
uint64_t boot_ns(void); /* CLOCK_BOOTTIME: time since boot */
uint64_t wall_ns(void);

#endif
