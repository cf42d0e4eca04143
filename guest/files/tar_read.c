/* Reading tar: old, ustar, GNU's long names, pax. */
#include <string.h>

#include "tar.h"

/* Where the parts of a header stand. */
enum { NAME = 0, MODE = 100, UID = 108, GID = 116, SIZE = 124, MTIME = 136, CHECK = 148, TYPE = 156, LINK = 157, MAGIC = 257, PREFIX = 345 };

static enum tar_step bad(struct tar_reader *reader, const char *why)
{
    reader->why = why;
    return TAR_BAD;
}

static bool octal(const uint8_t *at, size_t length, uint64_t *value)
{
    size_t i = 0;
    *value = 0;
    while (i < length && at[i] == ' ')
        i++;
    for (; i < length && at[i] >= '0' && at[i] <= '7'; i++) {
        if (*value >> 60)
            return false;
        *value = *value << 3 | (uint64_t)(at[i] - '0');
    }
    return i == length || at[i] == ' ' || at[i] == 0;
}

/* Octal, or the octets of a large or negative number behind a mark. */
static bool number(const uint8_t *at, size_t length, int64_t *value)
{
    uint64_t bits = at[0] == 0xff ? UINT64_MAX : 0;
    if (at[0] != 0x80 && at[0] != 0xff) {
        bool good = octal(at, length, &bits);
        *value = (int64_t)bits;
        return good && bits <= INT64_MAX;
    }
    for (size_t i = 1; i < length; i++) {
        if (length - i > 8 && at[i] != (at[0] == 0xff ? 0xff : 0))
            return false;
        bits = bits << 8 | at[i];
    }
    *value = (int64_t)bits;
    return (*value < 0) == (at[0] == 0xff);
}

static bool small(const uint8_t *at, size_t length, uint32_t *value)
{
    int64_t large;
    if (!number(at, length, &large) || large < 0 || large > UINT32_MAX)
        return false;
    *value = (uint32_t)large;
    return true;
}

static bool check_holds(const uint8_t *block)
{
    uint64_t said;
    uint32_t plain = 0;
    int32_t with_signs = 0;
    if (!octal(block + CHECK, 8, &said))
        return false;
    for (size_t i = 0; i < TAR_BLOCK; i++) {
        uint8_t octet = i >= CHECK && i < CHECK + 8 ? ' ' : block[i];
        plain += octet;
        with_signs += octet < 128 ? octet : octet - 256;
    }
    return said == plain || (with_signs >= 0 && said == (uint64_t)with_signs);
}

static void text(const uint8_t *at, size_t length, char *to)
{
    size_t n = 0;
    while (n < length && at[n])
        n++;
    memcpy(to, at, n);
    to[n] = 0;
}

static bool decimal(const char *at, size_t length, uint64_t most, uint64_t *value)
{
    *value = 0;
    for (size_t i = 0; i < length; i++) {
        if (at[i] < '0' || at[i] > '9' || *value > most / 10)
            return false;
        *value = *value * 10 + (uint64_t)(at[i] - '0');
    }
    return length > 0 && *value <= most;
}

/* [-]SECONDS[.FRACTION] */
static bool time_of(const char *at, size_t length, int64_t *seconds, uint32_t *ns)
{
    bool negative = length > 0 && at[0] == '-';
    uint64_t whole;
    uint32_t fraction = 0, unit = 100000000;
    size_t n = negative ? 1 : 0, dot = n;
    while (dot < length && at[dot] != '.')
        dot++;
    if (!decimal(at + n, dot - n, INT64_MAX / 4, &whole))
        return false;
    for (size_t i = dot + 1; i < length; i++, unit /= 10) {
        if (at[i] < '0' || at[i] > '9')
            return false;
        fraction += unit * (uint32_t)(at[i] - '0');
    }
    *seconds = negative ? -(int64_t)whole : (int64_t)whole;
    if (negative && fraction) {
        *seconds -= 1;
        fraction = 1000000000 - fraction;
    }
    *ns = fraction;
    return true;
}

static bool keep_name(const char *value, size_t length, bool *has, char name[TAR_NAME])
{
    *has = length > 0; /* an empty value takes back what was said before */
    if (length >= TAR_NAME || memchr(value, 0, length))
        return false;
    memcpy(name, value, length);
    name[length] = 0;
    return true;
}

static bool is(const char *key, size_t length, const char *wanted)
{
    return length == strlen(wanted) && memcmp(key, wanted, length) == 0;
}

static bool record(struct tar_reader *reader, const char *key, size_t key_length, const char *value, size_t length)
{
    uint64_t large;
    if (is(key, key_length, "path"))
        return keep_name(value, length, &reader->has_name, reader->name);
    if (is(key, key_length, "linkpath"))
        return keep_name(value, length, &reader->has_target, reader->target);
    if (key_length >= 11 && memcmp(key, "GNU.sparse.", 11) == 0)
        reader->sparse = true;
    if (is(key, key_length, "size")) {
        reader->has_size = length > 0;
        return length == 0 || decimal(value, length, INT64_MAX - TAR_BLOCK, &reader->size);
    }
    if (is(key, key_length, "mtime")) {
        reader->has_mtime = length > 0;
        return length == 0 || time_of(value, length, &reader->mtime, &reader->mtime_ns);
    }
    bool uid = is(key, key_length, "uid");
    if (uid || is(key, key_length, "gid")) {
        *(uid ? &reader->has_uid : &reader->has_gid) = length > 0;
        if (length > 0 && !decimal(value, length, UINT32_MAX - 1, &large))
            return false;
        *(uid ? &reader->uid : &reader->gid) = length > 0 ? (uint32_t)large : 0;
    }
    return true;
}

/* Records are "LENGTH KEY=VALUE\n", the length counting all of it. */
static bool records(struct tar_reader *reader, bool heeded)
{
    const char *at = reader->content, *end = at + reader->length;
    while (at < end) {
        uint64_t length;
        size_t digits = 0;
        while (at + digits < end && digits < 8 && at[digits] != ' ')
            digits++;
        if (at + digits >= end || at[digits] != ' ' || !decimal(at, digits, TAR_MAX_EXTENSION, &length) || length > (uint64_t)(end - at) ||
            length < digits + 4 || at[length - 1] != '\n')
            return false;
        const char *key = at + digits + 1, *stop = at + length - 1, *equals = memchr(key, '=', (size_t)(stop - key));
        if (!equals || equals == key)
            return false;
        if (heeded && !record(reader, key, (size_t)(equals - key), equals + 1, (size_t)(stop - equals - 1)))
            return false;
        at += length;
    }
    return true;
}

static enum tar_step extension_is_whole(struct tar_reader *reader)
{
    char kind = reader->extension;
    reader->extension = 0;
    if (kind == 'L' || kind == 'K') {
        const char *end = memchr(reader->content, 0, reader->length);
        size_t length = end ? (size_t)(end - reader->content) : reader->length;
        bool good = kind == 'L' ? keep_name(reader->content, length, &reader->has_name, reader->name)
                                : keep_name(reader->content, length, &reader->has_target, reader->target);
        return good ? TAR_MORE : bad(reader, "a name that is too long");
    }
    /* What a global header says of all members (mostly a comment) is not heeded. */
    return records(reader, kind != 'g') ? TAR_MORE : bad(reader, "a malformed pax header");
}

static void take_names(struct tar_reader *reader, const uint8_t *block)
{
    struct tar_member *member = &reader->member;
    char *name = member->name;
    if (memcmp(block + MAGIC, "ustar", 6) == 0 && block[PREFIX]) { /* with its 0; GNU's own format has a space there, and no prefix */
        text(block + PREFIX, 155, name);
        name += strlen(name);
        *name++ = '/';
    }
    text(block + NAME, 100, name);
    text(block + LINK, 100, member->target);
    if (reader->has_name)
        strcpy(member->name, reader->name);
    if (reader->has_target)
        strcpy(member->target, reader->target);
}

static enum tar_step take_member(struct tar_reader *reader, const uint8_t *block, char type, uint64_t size)
{
    struct tar_member *member = &reader->member;
    int64_t mtime;
    if (!small(block + MODE, 8, &member->mode) || !number(block + MTIME, 12, &mtime) ||
        (!reader->has_uid && !small(block + UID, 8, &member->uid)) || (!reader->has_gid && !small(block + GID, 8, &member->gid)))
        return bad(reader, "a malformed number");
    if (reader->has_uid)
        member->uid = reader->uid;
    if (reader->has_gid)
        member->gid = reader->gid;
    member->mtime = reader->has_mtime ? reader->mtime : mtime;
    member->mtime_ns = reader->has_mtime ? reader->mtime_ns : 0;
    take_names(reader, block);
    bool sparse = reader->sparse || type == 'S';
    size_t length = strlen(member->name);
    if (type == 0 || type == '7')
        type = '0';
    if (type == '0' && length > 0 && member->name[length - 1] == '/')
        type = '5'; /* old archives have no other sign of a folder */
    reader->has_name = reader->has_target = reader->has_size = reader->has_uid = reader->has_gid = reader->has_mtime = reader->sparse = false;
    if (sparse || !memchr("0123456V", type, 8)) {
        reader->why = sparse ? "a sparse member" : "a member of a kind that is not known here";
        return TAR_UNSUPPORTED;
    }
    member->type = (enum tar_type)type;
    member->size = type == '0' || type == 'V' ? size : 0; /* the others have no data, whatever they say */
    member->mode &= 07777;
    return TAR_MEMBER;
}

enum tar_step tar_read(struct tar_reader *reader, const uint8_t block[TAR_BLOCK])
{
    static const uint8_t nothing[TAR_BLOCK];
    int64_t said;
    if (reader->extension) {
        uint32_t part = reader->expected - reader->length < TAR_BLOCK ? reader->expected - reader->length : TAR_BLOCK;
        memcpy(reader->content + reader->length, block, part);
        reader->length += part;
        return reader->length == reader->expected ? extension_is_whole(reader) : TAR_MORE;
    }
    if (memcmp(block, nothing, TAR_BLOCK) == 0)
        return ++reader->zeros == 2 ? TAR_END : TAR_MORE;
    if (reader->zeros)
        return bad(reader, "something behind the first half of its end");
    if (!check_holds(block))
        return bad(reader, "a header whose sum is wrong");
    if (!number(block + SIZE, 12, &said) || said < 0 || said > INT64_MAX - TAR_BLOCK)
        return bad(reader, "a malformed size");
    char type = (char)block[TYPE];
    if (!memchr("xXgLK", type, 5))
        return take_member(reader, block, type, reader->has_size ? reader->size : (uint64_t)said);
    if (said > (type == 'L' || type == 'K' ? TAR_NAME : TAR_MAX_EXTENSION))
        return bad(reader, "a pax header or a name that is too long");
    reader->extension = type == 'X' ? 'x' : type;
    reader->expected = (uint32_t)said;
    reader->length = 0;
    return said == 0 ? extension_is_whole(reader) : TAR_MORE;
}

bool tar_may_end(const struct tar_reader *reader)
{
    return reader->zeros > 0 && !reader->extension;
}

bool tar_clean(char *name)
{
    const char *from = name;
    char *to = name;
    if (*name == '/')
        return false;
    while (*from) {
        size_t length = strcspn(from, "/");
        if (length == 2 && from[0] == '.' && from[1] == '.')
            return false;
        if (length > 0 && !(length == 1 && *from == '.')) {
            if (to > name)
                *to++ = '/';
            memmove(to, from, length);
            to += length;
        }
        from += length + (from[length] == '/');
    }
    *to = 0;
    return true;
}
