/* The guest channel: the octets in and out, what goes first, and the handshake. */
#ifndef HW_CHANNEL_H
#define HW_CHANNEL_H

#include <stdbool.h>
#include <stdint.h>

#include "fields.h"

/* Uses a port that is always there (virtio-serial), or accepts connections one at a time on a listening socket. */
bool channel_use_port(int fd);
bool channel_use_listener(int fd);

/* Moves octets both ways as far as they go now; true when it should be called again at once. */
bool channel_pump(void);

/* When to try a port again that failed for want of memory (CLOCK_MONOTONIC; 0: it did not). */
uint64_t channel_deadline(void);
void channel_expire(void);

/* True when everything that was queued is written, or nobody listens. */
bool channel_flushed(void);

/* Answers a request. Between begin and end the writer takes further fields. */
struct field_writer response_begin(int status);
void response_end(uint32_t request, struct field_writer *writer);
void respond_done(uint32_t request);
/* STATUS, and for an error its MESSAGE. */
void respond(uint32_t request, int status, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* For the fuzzer: takes octets as if the host had sent them. */
void channel_feed(const uint8_t *data, size_t count);

#endif
