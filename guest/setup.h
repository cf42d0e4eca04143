/* Identity of the sandbox: clock, entropy, host name, machine-id, environment; and what it uses. */
#ifndef HW_SETUP_H
#define HW_SETUP_H

#include <stddef.h>
#include <stdint.h>

/* SETUP: does all of it and answers. */
void setup_request(uint32_t request, const uint8_t *payload, size_t length);
/* METRICS: answers. */
void metrics_request(uint32_t request);
/* The sandbox's environment, NULL-ended. */
const char *const *setup_environment(void);
/* Lays out host name and machine-id at start-up, so that a later SETUP only overwrites them in place. */
void setup_first(void);

#endif
