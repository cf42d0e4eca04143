/* Hostile octets from the host's side: parser, requests, process table and rings, everything but the real starting of programs.
   With clang it is a libFuzzer target (HW_LIBFUZZER); else main() makes its own inputs from a seed, so that a failure can be
   repeated: `fuzz SECONDS SEED` (each input has a seed of its own, counted up from SEED). */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../channel.h"
#include "../frame.h"
#include "../loop.h"
#include "../proc.h"
#include "../stream.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void send(uint8_t type, uint32_t stream, const struct field_writer *fields, uint8_t *frame)
{
    size_t length = fields ? (size_t)(fields->at - frame - FRAME_HEADER) : 0;
    channel_feed(frame, frame_finish(frame, type, 0, stream, (uint32_t)length));
}

static void hello(void)
{
    static uint8_t zeros[FRAME_MAX], frame[FRAME_MAX];
    struct field_writer fields = {frame + FRAME_HEADER, frame + sizeof frame - FRAME_TRAILER, false};
    write_u32(&fields, F_VERSION, HW_VERSION);
    write_bytes(&fields, F_NONCE, zeros, 16);
    channel_feed(zeros, sizeof zeros);
    send(T_HELLO, 0, &fields, frame);
}

static void close_all(void)
{
    static uint8_t frame[64];
    unsigned cursor = 0;
    struct proc *proc;
    while ((proc = proc_each(&cursor))) {
        struct field_writer fields = {frame + FRAME_HEADER, frame + sizeof frame - FRAME_TRAILER, false};
        write_u64(&fields, F_SIZE, proc->number);
        send(T_CLOSE, 1, &fields, frame);
        cursor = 0;
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static bool open;
    if (!open && !(loop_open() && procs_open()))
        abort();
    open = true;
    hello();
    for (size_t at = 0; at < size; at += 4096) {
        channel_feed(data + at, size - at < 4096 ? size - at : 4096);
        loop_turn(0);
    }
    hello();
    loop_turn(0);
    close_all();
    if (!streams_idle()) /* a chunk or a credit was lost */
        abort();
    return 0;
}

#ifndef HW_LIBFUZZER

static uint64_t state;

static uint32_t roll(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)((state >> 11) % below);
}

static uint64_t odd_number(void)
{
    static const uint64_t odd[] = {0, 1, 2, 15, 16, 255, 4096, 65535, 65536, 1u << 31, UINT32_MAX, 1ull << 40, UINT64_MAX - 1, UINT64_MAX};
    return roll(2) ? odd[roll(sizeof odd / sizeof odd[0])] : roll(5000);
}

static void put_field(struct field_writer *fields)
{
    static const char text[] = "K=v\0PATH=/x\0/bin/sh\0user";
    uint16_t tag = (uint16_t)roll(60);
    switch (roll(4)) {
    case 0: write_u32(fields, tag, (uint32_t)odd_number()); break;
    case 1: write_u64(fields, tag, odd_number()); break;
    case 2: write_bytes(fields, tag, text, roll(sizeof text)); break;
    default: write_bytes(fields, tag, text + 12, 7); break;
    }
}

/* The fields that a request wants, so that it gets beyond the checks. */
static void put_wanted(struct field_writer *fields, uint8_t type)
{
    char key[4] = {'k', (char)('0' + roll(8)), 0, 0};
    write_u64(fields, F_SIZE, roll(10));
    if (type == T_SPAWN) {
        write_text(fields, F_KEY, key);
        write_text(fields, F_ARG, roll(4) ? "arg" : "files");
        write_u32(fields, F_FLAGS, roll(16));
        if (roll(4) == 0)
            write_u64(fields, (uint16_t)(F_LIMIT_MEMORY + roll(4)), odd_number());
    } else if (type == T_DIAL) {
        write_text(fields, F_KEY, key);
        write_u32(fields, F_PORT, 1 + roll(8));
        if (roll(3) == 0)
            write_text(fields, F_HOST, roll(2) ? "::1" : "127.0.0.2");
    } else if (type == T_OUTPUT_ACK) {
        write_u64(fields, F_STDOUT_ACK, odd_number());
        write_u64(fields, F_STDERR_ACK, odd_number());
        write_u64(fields, F_LIMIT, odd_number());
    } else if (type == T_FREEZE) {
        write_u64(fields, F_TIMEOUT_MS, roll(70000));
    } else if (type == T_SIGNAL) {
        write_u32(fields, F_SIGNAL, roll(70));
        write_u32(fields, F_SCOPE, roll(3));
    } else if (type == T_SETUP) {
        write_text(fields, F_ENV, "A=b");
        write_text(fields, F_HOSTNAME, "name");
        if (roll(2))
            write_text(fields, F_CA, roll(3) ? "-----BEGIN CERTIFICATE-----\nAA==\n-----END CERTIFICATE-----\n" : "no certificate");
    } else if (type == T_RESIZE) {
        write_u32(fields, F_ROWS, roll(70000));
        write_u32(fields, F_COLS, roll(70000));
    }
}

static size_t make_frame(uint8_t *to, size_t room)
{
    static const uint8_t types[] = {1, 16, 17, 18, 18, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 28, 28, 33, 33, 34, 34, 34};
    uint8_t type = roll(20) ? types[roll(sizeof types)] : (uint8_t)roll(256);
    struct field_writer fields = {to + FRAME_HEADER, to + room - FRAME_TRAILER, false};
    if (type == T_INPUT) {
        size_t length = 16 + (roll(4) ? roll(200) : roll((uint32_t)(room - FRAME_HEADER - FRAME_TRAILER - 16)));
        memset(fields.at, (int)roll(256), length);
        put_u64(fields.at + 8, roll(3) ? 0 : odd_number());
        fields.at += length;
    } else {
        if (roll(8))
            put_wanted(&fields, type);
        for (uint32_t i = roll(6); i > 0; i--)
            put_field(&fields);
    }
    size_t length = (size_t)(fields.at - to - FRAME_HEADER);
    if (roll(10) == 0)
        for (uint32_t i = 1 + roll(8); i > 0 && length > 0; i--)
            to[FRAME_HEADER + roll((uint32_t)length)] ^= (uint8_t)(1u << roll(8));
    if (roll(20) == 0 && length > 0)
        length = roll((uint32_t)length);
    return frame_finish(to, type, (uint8_t)(roll(10) ? 0 : roll(4)), roll(12), (uint32_t)length);
}

static unsigned open_descriptors(void)
{
    unsigned count = 0;
    DIR *dir = opendir("/proc/self/fd");
    while (dir && readdir(dir))
        count++;
    if (dir)
        closedir(dir);
    return count;
}

extern void __sanitizer_set_death_callback(void (*callback)(void));
static unsigned long long current;

static void on_death(void)
{
    fprintf(stderr, "the failing input is the first one of seed %llu\n", current);
}

static void on_abort(int signal)
{
    on_death();
    _exit(128 + signal);
}

int main(int argc, char **argv)
{
    static uint8_t input[1 << 20];
    time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 10);
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    unsigned long inputs = 0;
    unsigned descriptors = 0;
    __sanitizer_set_death_callback(on_death);
    signal(SIGABRT, on_abort);
    while (time(NULL) < end) {
        state = (seed + inputs) * 0x9e3779b97f4a7c15u + 1;
        size_t size = 0;
        for (uint32_t i = 1 + roll(60); i > 0 && sizeof input - size > FRAME_MAX; i--) {
            size_t room = roll(20) ? 2048 : FRAME_MAX;
            size_t length = make_frame(input + size, room);
            if (roll(15) == 0 && length > 1) /* cut off: the next frame stands in its middle */
                length = roll((uint32_t)length);
            size += length;
        }
        if (roll(3) == 0)
            for (uint32_t i = 1 + roll(4); i > 0 && size > 0; i--)
                input[roll((uint32_t)size)] = (uint8_t)roll(256);
        current = seed + inputs;
        LLVMFuzzerTestOneInput(input, size);
        if (++inputs == 1)
            descriptors = open_descriptors();
        else if (open_descriptors() != descriptors)
            abort();
    }
    printf("fuzz: %lu inputs from seed %llu, no failure\n", inputs, (unsigned long long)seed);
    return inputs == 0;
}

#endif
