/* A host's end of the guest channel, for tests: an agent in host mode, a connection to it, what it said. */
#ifndef HW_TEST_CLIENT_H
#define HW_TEST_CLIENT_H

#include <stdbool.h>
#include <stdint.h>

#include "../fields.h"
#include "../frame.h"

enum { SEEN_PROCS = 700, KEEP_OUTPUT = 1 << 20 };

/* The last PROC of a process, and its output as the client stored it. */
struct seen {
    uint32_t state, reason, exit_code, exit_signal, pid;
    uint64_t total[2], stdin_taken, stdin_limit;
    char message[256];
    unsigned frames;      /* PROC frames */
    bool was_exited;      /* one of them said state 2 */
    uint8_t *output[2];
    uint64_t stored[2];
};

extern struct seen seen[SEEN_PROCS];
extern unsigned frames_before_ready; /* PROC frames between the last HELLO_ACK and READY */

struct answer {
    int32_t status;
    uint32_t pid;
    char message[256];
    uint64_t size, time_ns;
    uint32_t cpus, tasks;
};

/* Starts the agent (path of its binary) on a socket in a new temporary folder; it ends with the test. */
void agent_start(const char *binary);
/* Ends it by SIGTERM and checks that it ended well. */
void agent_stop(void);

/* Connects, and (unless bare) goes through the handshake. Forgets the process states of an earlier connection, keeps the output. */
void link_up(bool bare);
void link_down(void);
void handshake(void);
void send_raw(const void *data, size_t count);
void send_frame(uint8_t type, uint8_t flags, uint32_t stream, const struct field_writer *fields);

/* An empty payload to write fields into. */
struct field_writer *payload(void);

struct answer request(uint8_t type, const struct field_writer *fields);
/* SPAWN of `sh -c command` as process `number`, with key "key-NUMBER"; acknowledges `limit` octets of output unless 0. */
struct answer spawn_shell(uint32_t number, const char *command, uint32_t flags, uint64_t limit);
/* DIAL as connection `number`, with key "key-NUMBER"; host NULL: the loopback. Acknowledges `limit` octets unless 0. */
struct answer dial(uint32_t number, uint16_t port, const char *host, uint64_t limit);
struct answer on_process(uint8_t type, uint32_t number);
void acknowledge(uint32_t number, uint64_t limit);
void input(uint32_t number, uint64_t offset, const char *data, size_t count, bool eof);

/* Reads frames until the condition holds; a minute without it fails the test. */
#define UNTIL(condition)           \
    do {                           \
        start_waiting();           \
        while (!(condition))       \
            take_frame(#condition); \
    } while (0)
void start_waiting(void);
void take_frame(const char *waiting_for);
/* Reads what is there without waiting for more. */
void take_what_is_there(void);

/* Acknowledge output as it comes, with this limit (0: do not). */
extern uint64_t auto_limit;

#endif
