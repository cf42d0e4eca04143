/* The end: all processes are killed, the disk is flushed and read-only, the machine goes off. */
#ifndef HW_POWER_H
#define HW_POWER_H

#include <stdbool.h>
#include <stdint.h>

/* Begins; the loop goes on so that the answer gets out. */
void power_down(bool reboot);
/* SIGTERM or SIGINT: host mode ends. */
void power_signal(void);
uint64_t power_deadline(void);
void power_expire(void);
/* What comes after the loop; does not return. */
_Noreturn void power_finish(void);
/* Start-up failed: says why and powers off. */
_Noreturn void fatal(const char *format, ...) __attribute__((format(printf, 1, 2)));

#endif
