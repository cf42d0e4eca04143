#include "frame.h"

#include <string.h>

static const uint8_t MAGIC[4] = {'H', 'W', 'F', '1'};
static const uint8_t TRAILER[FRAME_TRAILER] = {0xa5, 0x5a, 0xc3, 0x3c};

uint16_t frame_check(const uint8_t header[FRAME_HEADER])
{
    uint32_t sum1 = 0, sum2 = 0;
    for (int i = 0; i < FRAME_HEADER; i++) {
        if (i != 6 && i != 7)
            sum1 += header[i];
        sum2 += sum1; /* at most 16 * 16 * 255: the remainders can wait */
    }
    return (uint16_t)(sum1 % 255 | (sum2 % 255) << 8);
}

uint8_t *frame_space(struct frame_parser *parser, size_t *room)
{
    if (parser->start == parser->end) {
        parser->start = parser->end = 0;
    } else if (parser->start > 0 && sizeof parser->buffer - parser->end < 8192) {
        memmove(parser->buffer, parser->buffer + parser->start, parser->end - parser->start);
        parser->end -= parser->start;
        parser->start = 0;
    }
    size_t have = parser->end - parser->start;
    *room = sizeof parser->buffer - parser->end;
    if (parser->whole > have && parser->whole - have < *room)
        *room = parser->whole - have;
    return parser->buffer + parser->end;
}

void frame_commit(struct frame_parser *parser, size_t count)
{
    parser->end += count;
}

/* Moves start to the next place where the magic stands or could still begin. */
static void hunt(struct frame_parser *parser)
{
    const uint8_t *at = parser->buffer + parser->start;
    const uint8_t *end = parser->buffer + parser->end;
    while (at < end) {
        const uint8_t *found = memchr(at, MAGIC[0], (size_t)(end - at));
        if (!found) {
            at = end;
            break;
        }
        size_t have = (size_t)(end - found);
        if (memcmp(found, MAGIC, have < sizeof MAGIC ? have : sizeof MAGIC) == 0) {
            at = found;
            break;
        }
        at = found + 1;
    }
    size_t start = (size_t)(at - parser->buffer);
    parser->dropped += start - parser->start;
    parser->start = start;
}

bool frame_next(struct frame_parser *parser, struct frame *frame)
{
    for (;;) {
        if (parser->whole > parser->end - parser->start)
            return false;
        parser->whole = 0;
        hunt(parser);
        const uint8_t *header = parser->buffer + parser->start;
        size_t have = parser->end - parser->start;
        if (have < FRAME_HEADER)
            return false;
        uint32_t length = get_u32(header + 12);
        uint16_t check = (uint16_t)(header[6] | header[7] << 8);
        if (length > FRAME_MAX_PAYLOAD || check != frame_check(header)) {
            parser->start++;
            parser->dropped++;
            continue;
        }
        size_t whole = FRAME_HEADER + (size_t)length + FRAME_TRAILER;
        if (have < whole) {
            parser->whole = whole;
            return false;
        }
        parser->start += whole;
        if (memcmp(header + FRAME_HEADER + length, TRAILER, FRAME_TRAILER) != 0) {
            parser->dropped += whole;
            continue;
        }
        frame->type = header[4];
        frame->flags = header[5];
        frame->stream = get_u32(header + 8);
        frame->length = length;
        frame->payload = header + FRAME_HEADER;
        return true;
    }
}

size_t frame_finish(uint8_t *to, uint8_t type, uint8_t flags, uint32_t stream, uint32_t length)
{
    memcpy(to, MAGIC, sizeof MAGIC);
    to[4] = type;
    to[5] = flags;
    to[6] = to[7] = 0;
    put_u32(to + 8, stream);
    put_u32(to + 12, length);
    put_u16(to + 6, frame_check(to));
    memcpy(to + FRAME_HEADER + length, TRAILER, FRAME_TRAILER);
    return FRAME_HEADER + (size_t)length + FRAME_TRAILER;
}
