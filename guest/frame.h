/* Frames of the guest channel: a parser that finds them in a byte stream, and their writer. Pure: no allocation, no I/O. */
#ifndef HW_FRAME_H
#define HW_FRAME_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto.h"

enum { PARSER_BUFFER = FRAME_MAX + 32768 };

struct frame {
    uint8_t type;
    uint8_t flags;
    uint32_t stream;
    uint32_t length;
    const uint8_t *payload; /* valid until the next call on its parser */
};

/* Zero-initialised is ready for use. */
struct frame_parser {
    size_t start, end; /* octets in buffer[start..end) are not consumed yet */
    size_t whole;      /* length of the frame that begins at start, once its header is there; 0 before */
    uint64_t dropped;  /* octets that belonged to no good frame */
    uint8_t buffer[PARSER_BUFFER];
};

/* Where to put the next octets; *room is at least 1 after frame_next() returned false. It ends with the frame that is under way, so that
   the next one begins at the start of the buffer and nothing has to be moved there. */
uint8_t *frame_space(struct frame_parser *parser, size_t *room);

/* Says that count octets were put at frame_space(). */
void frame_commit(struct frame_parser *parser, size_t count);

/* Takes the next good frame; false when more octets are needed first. A frame with a bad trailer is dropped whole: its
   payload was chosen by others and must never be searched for frames. */
bool frame_next(struct frame_parser *parser, struct frame *frame);

/* Writes header and trailer around a payload of length octets that stands at to + FRAME_HEADER; returns the octets in all. */
size_t frame_finish(uint8_t *to, uint8_t type, uint8_t flags, uint32_t stream, uint32_t length);

/* Fletcher-16 (mod 255) over a header, its check taken as 0. */
uint16_t frame_check(const uint8_t header[FRAME_HEADER]);

static inline uint32_t get_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t get_u64(const uint8_t *p)
{
    return (uint64_t)get_u32(p) | (uint64_t)get_u32(p + 4) << 32;
}

static inline void put_u16(uint8_t *p, uint16_t v)
{
    p[0] = (uint8_t)v;
    p[1] = (uint8_t)(v >> 8);
}

static inline void put_u32(uint8_t *p, uint32_t v)
{
    put_u16(p, (uint16_t)v);
    put_u16(p + 2, (uint16_t)(v >> 16));
}

static inline void put_u64(uint8_t *p, uint64_t v)
{
    put_u32(p, (uint32_t)v);
    put_u32(p + 4, (uint32_t)(v >> 32));
}

#endif
