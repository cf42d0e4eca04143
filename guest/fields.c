#include "fields.h"

#include <string.h>

#include "frame.h"

bool field_next(struct field_reader *reader, struct field *field)
{
    size_t left = (size_t)(reader->end - reader->at);
    if (left == 0)
        return false;
    if (left < 6) {
        reader->bad = true;
        return false;
    }
    field->tag = (uint16_t)(reader->at[0] | reader->at[1] << 8);
    field->length = get_u32(reader->at + 2);
    field->value = reader->at + 6;
    if (field->length > left - 6) {
        reader->bad = true;
        return false;
    }
    reader->at = field->value + field->length;
    return true;
}

bool field_u32(const struct field *field, uint32_t *to)
{
    if (field->length != 4)
        return false;
    *to = get_u32(field->value);
    return true;
}

bool field_u64(const struct field *field, uint64_t *to)
{
    if (field->length != 8)
        return false;
    *to = get_u64(field->value);
    return true;
}

bool field_text(const struct field *field, char *to, size_t room)
{
    if (field->length >= room || (field->length && memchr(field->value, 0, field->length)))
        return false;
    memcpy(to, field->value, field->length);
    to[field->length] = 0;
    return true;
}

void write_bytes(struct field_writer *writer, uint16_t tag, const void *value, size_t length)
{
    if (length > (size_t)UINT32_MAX || (size_t)(writer->end - writer->at) < 6 + length) {
        writer->full = true;
        return;
    }
    put_u16(writer->at, tag);
    put_u32(writer->at + 2, (uint32_t)length);
    if (length)
        memcpy(writer->at + 6, value, length);
    writer->at += 6 + length;
}

void write_text(struct field_writer *writer, uint16_t tag, const char *text)
{
    write_bytes(writer, tag, text, strlen(text));
}

void write_u32(struct field_writer *writer, uint16_t tag, uint32_t value)
{
    uint8_t octets[4];
    put_u32(octets, value);
    write_bytes(writer, tag, octets, sizeof octets);
}

void write_u64(struct field_writer *writer, uint16_t tag, uint64_t value)
{
    uint8_t octets[8];
    put_u64(octets, value);
    write_bytes(writer, tag, octets, sizeof octets);
}
