/* Fields: the payload of every frame that is not raw data, `tag u16, length u32, value`. */
#ifndef HW_FIELDS_H
#define HW_FIELDS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct field {
    uint16_t tag;
    uint32_t length;
    const uint8_t *value;
};

struct field_reader {
    const uint8_t *at, *end;
    bool bad; /* the payload ended inside a field */
};

static inline struct field_reader fields_of(const uint8_t *payload, size_t length)
{
    return (struct field_reader){payload, payload + length, false};
}

/* Takes the next field; false at the end or when the rest is malformed (then reader->bad). */
bool field_next(struct field_reader *reader, struct field *field);

/* The value as a number or text; false when its length or content is not what the type demands. Text has no NUL and at
   most room - 1 octets, and is ended by a NUL in `to`. */
bool field_u32(const struct field *field, uint32_t *to);
bool field_u64(const struct field *field, uint64_t *to);
bool field_text(const struct field *field, char *to, size_t room);

/* A bounded payload under construction. What does not fit is left out and `full` is set. */
struct field_writer {
    uint8_t *at, *end;
    bool full;
};

void write_bytes(struct field_writer *writer, uint16_t tag, const void *value, size_t length);
void write_text(struct field_writer *writer, uint16_t tag, const char *text);
void write_u32(struct field_writer *writer, uint16_t tag, uint32_t value);
void write_u64(struct field_writer *writer, uint16_t tag, uint64_t value);

#endif
