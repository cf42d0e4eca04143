/* Identity of the sandbox: clock, entropy, host name, machine-id, environment. */
#ifndef HW_SETUP_H
#define HW_SETUP_H

#include <stddef.h>
#include <stdint.h>

/* SETUP: does all of it and answers. */
void setup_request(uint32_t request, const uint8_t *payload, size_t length);
/* The sandbox's environment, NULL-ended. */
const char *const *setup_environment(void);
/* Binds the files of the identity over the sandbox's; before the processes' mount namespace is made. */
void setup_lay_out(void);
/* At the end: writes the files of the identity to the disk, so that a stopped sandbox keeps them. */
void setup_keep(void);
/* Lays out host name and machine-id at start-up, so that a later SETUP only overwrites them in place. */
void setup_first(void);

#endif
