#include "say.h"

#include <errno.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "octets.h"
#include "upload.h"

enum { MAX_COUNTERS = 8 };

static struct {
    const char *key;
    const uint64_t *value;
} counters[MAX_COUNTERS];
static int counter_count;
static struct line said;
static bool is_ok;

static void put(struct line *line, const char *text, size_t length)
{
    if (length <= sizeof line->text - line->length) {
        memcpy(line->text + line->length, text, length);
        line->length += length;
    }
}

void line_raw(struct line *line, const char *text)
{
    put(line, text, strlen(text));
}

void line_key(struct line *line, const char *key)
{
    if (line->length > 0 && line->text[line->length - 1] != '{')
        put(line, ",", 1);
    put(line, "\"", 1);
    line_raw(line, key);
    put(line, "\":", 2);
}

void line_unsigned(struct line *line, const char *key, uint64_t value)
{
    char digits[24];
    line_key(line, key);
    put(line, digits, (size_t)snprintf(digits, sizeof digits, "%llu", (unsigned long long)value));
}

void line_signed(struct line *line, const char *key, int64_t value)
{
    char digits[24];
    line_key(line, key);
    put(line, digits, (size_t)snprintf(digits, sizeof digits, "%lld", (long long)value));
}

void line_bool(struct line *line, const char *key, bool value)
{
    line_key(line, key);
    line_raw(line, value ? "true" : "false");
}

/* The octets of the character that begins here; 0: none does. */
static size_t character(const unsigned char *at, size_t left)
{
    size_t size = at[0] < 0x80 ? 1 : at[0] >= 0xc2 && at[0] < 0xe0 ? 2 : at[0] >= 0xe0 && at[0] < 0xf0 ? 3 : at[0] >= 0xf0 && at[0] < 0xf5 ? 4 : 0;
    if (size == 0 || size > left)
        return 0;
    for (size_t i = 1; i < size; i++)
        if ((at[i] & 0xc0) != 0x80)
            return 0;
    if ((at[0] == 0xe0 && at[1] < 0xa0) || (at[0] == 0xed && at[1] > 0x9f) || (at[0] == 0xf0 && at[1] < 0x90) || (at[0] == 0xf4 && at[1] > 0x8f))
        return 0; /* too long a form, half of a pair, beyond the last one */
    return size;
}

/* A JSON string of at most TEXT_ROOM octets; whether it is exactly what it was made of. */
static bool quoted(struct line *line, const char *octets, size_t length)
{
    const unsigned char *at = (const unsigned char *)octets;
    size_t start = line->length;
    bool exact = true;
    put(line, "\"", 1);
    while (length > 0) {
        char escaped[8];
        size_t size = character(at, length);
        if (line->length - start > TEXT_ROOM) {
            exact = false;
            break;
        }
        if (size == 0) {
            put(line, "\xef\xbf\xbd", 3);
            exact = false;
            size = 1;
        } else if (at[0] < 0x20 || at[0] == '"' || at[0] == '\\') {
            put(line, escaped, (size_t)snprintf(escaped, sizeof escaped, at[0] < 0x20 ? "\\u%04x" : "\\%c", at[0]));
        } else {
            put(line, (const char *)at, size);
        }
        at += size;
        length -= size;
    }
    put(line, "\"", 1);
    return exact;
}

static void base64(struct line *line, const char *octets, size_t length)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const unsigned char *at = (const unsigned char *)octets;
    put(line, "\"", 1);
    for (; length > 0; at += 3) {
        size_t here = length < 3 ? length : 3;
        uint32_t bits = (uint32_t)at[0] << 16 | (here > 1 ? (uint32_t)at[1] << 8 : 0) | (here > 2 ? at[2] : 0u);
        char four[4] = {digits[bits >> 18], digits[bits >> 12 & 63], here > 1 ? digits[bits >> 6 & 63] : '=', here > 2 ? digits[bits & 63] : '='};
        put(line, four, 4);
        length -= here;
    }
    put(line, "\"", 1);
}

void line_octets(struct line *line, const char *key, const char *octets, size_t length)
{
    line_key(line, key);
    if (!quoted(line, octets, length)) {
        char exact[32];
        snprintf(exact, sizeof exact, "%s_base64", key);
        line_key(line, exact);
        base64(line, octets, length);
    }
}

void line_text(struct line *line, const char *key, const char *text)
{
    line_key(line, key);
    quoted(line, text, strlen(text));
}

void line_pair(struct line *line, const char *key, const char *text)
{
    if (line->length > 0 && line->text[line->length - 1] != '{')
        put(line, ",", 1);
    quoted(line, key, strlen(key));
    put(line, ":", 1);
    quoted(line, text, strlen(text));
}

bool utf8_whole(const char *octets, size_t length)
{
    size_t size;
    for (; length > 0; octets += size, length -= size)
        if ((size = character((const unsigned char *)octets, length)) == 0)
            return false;
    return true;
}

void say_count(const char *key, const uint64_t *value)
{
    if (counter_count < MAX_COUNTERS) {
        counters[counter_count].key = key;
        counters[counter_count++].value = value;
    }
}

static void add_counters(void)
{
    for (int i = 0; i < counter_count; i++)
        line_unsigned(&said, counters[i].key, *counters[i].value);
}

struct line *say_head(void)
{
    said.length = 0;
    is_ok = false;
    line_raw(&said, "{\"head\":{");
    return &said;
}

struct line *say_ok(void)
{
    out_flush();
    said.length = 0;
    is_ok = true;
    line_raw(&said, "{\"ok\":{");
    return &said;
}

void say_end(struct line *line)
{
    if (is_ok)
        add_counters();
    line_raw(line, "}}\n");
    write_all(2, line->text, line->length);
}

static const struct {
    int error;
    const char *name;
} names[] = {
#define NAMED(error) {error, #error}
    NAMED(EPERM),   NAMED(ENOENT),  NAMED(EINTR),     NAMED(EIO),     NAMED(ENXIO),  NAMED(E2BIG),        NAMED(EBADF),
    NAMED(EAGAIN),  NAMED(ENOMEM),  NAMED(EACCES),    NAMED(EFAULT),  NAMED(EBUSY),  NAMED(EEXIST),       NAMED(EXDEV),
    NAMED(ENODEV),  NAMED(ENOTDIR), NAMED(EISDIR),    NAMED(EINVAL),  NAMED(ENFILE), NAMED(EMFILE),       NAMED(ENOTTY),
    NAMED(ETXTBSY), NAMED(EFBIG),   NAMED(ENOSPC),    NAMED(ESPIPE),  NAMED(EROFS),  NAMED(EMLINK),       NAMED(EPIPE),
    NAMED(ELOOP),   NAMED(EDQUOT),  NAMED(ENOTEMPTY), NAMED(EBADMSG), NAMED(ENOSYS), NAMED(ENAMETOOLONG), NAMED(EMSGSIZE),
    NAMED(ESTALE),  NAMED(ENODATA), NAMED(EOPNOTSUPP), NAMED(EOVERFLOW), NAMED(ETIMEDOUT), NAMED(ESRCH),
    NAMED(EREMOTE),
};

static _Noreturn void end_with(int error, const char *octets, size_t length)
{
    char number[16];
    const char *name = number;
    snprintf(number, sizeof number, "E%d", error);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (names[i].error == error)
            name = names[i].name;
    upload_discard();
    out_flush();
    said.length = 0;
    line_raw(&said, "{");
    line_signed(&said, "errno", error);
    line_text(&said, "code", name);
    line_key(&said, "message");
    quoted(&said, octets, length);
    add_counters();
    line_raw(&said, "}\n");
    write_all(2, said.text, said.length);
    exit(1);
}

void fail(int error, const char *format, ...)
{
    char text[1024];
    va_list list;
    va_start(list, format);
    int length = vsnprintf(text, sizeof text, format, list);
    va_end(list);
    end_with(error, text, length < 0 ? 0 : (size_t)length < sizeof text ? (size_t)length : sizeof text - 1);
}

void fail_at(int error, const char *path)
{
    fail(error, "%.900s: %s", path, strerror(error));
}

static char waiting[LINE_ROOM];
static size_t waiting_length;

void out_flush(void)
{
    size_t length = waiting_length;
    waiting_length = 0;
    write_all(1, waiting, length);
}

void out_line(const struct line *line)
{
    if (line->length > sizeof waiting - waiting_length)
        out_flush();
    memcpy(waiting + waiting_length, line->text, line->length);
    waiting_length += line->length;
}
