/* Writing tar: ustar headers, with a pax one in front where ustar has no room. */
#include <stdio.h>
#include <string.h>

#include "tar.h"

enum { MAX_OCTAL_7 = 07777777, CHECK = 148 };

struct records {
    char *text;
    size_t length, room;
};

static void record(struct records *records, const char *key, const char *value)
{
    size_t length = strlen(key) + strlen(value) + 3, digits = 1; /* blank, '=', newline */
    for (size_t ten = 10; length + digits >= ten; ten *= 10)
        digits++;
    int n = snprintf(records->text + records->length, records->room - records->length, "%zu %s=%s\n", length + digits, key, value);
    records->length += (size_t)n;
}

static void record_number(struct records *records, const char *key, int64_t value)
{
    char digits[24];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    record(records, key, digits);
}

static bool is_ascii(const char *text)
{
    for (; *text; text++)
        if (*text & 0x80)
            return false;
    return true;
}

/* Whether it is UTF-8: only that may stand in a pax header that says nothing else. */
static bool is_utf8(const char *text)
{
    for (const unsigned char *at = (const unsigned char *)text; *at;) {
        int more = *at < 0x80 ? 0 : *at >= 0xc2 && *at < 0xe0 ? 1 : *at >= 0xe0 && *at < 0xf0 ? 2 : *at >= 0xf0 && *at < 0xf5 ? 3 : -1;
        if (more < 0 || (*at == 0xe0 && at[1] < 0xa0) || (*at == 0xed && at[1] > 0x9f) || (*at == 0xf0 && at[1] < 0x90) || (*at == 0xf4 && at[1] > 0x8f))
            return false;
        at++;
        for (; more > 0; more--, at++)
            if ((*at & 0xc0) != 0x80)
                return false;
    }
    return true;
}

/* Where a name is to be cut so that both parts fit into a ustar header; 0: it need not be, -1: it cannot. */
static int cut_of(const char *name)
{
    size_t length = strlen(name);
    if (length <= 100)
        return 0;
    for (size_t cut = length > 156 ? 155 : length - 1; cut > 0; cut--)
        if (name[cut] == '/' && length - cut - 1 <= 100)
            return length - cut - 1 > 0 ? (int)cut : -1;
    return -1;
}

/* At most `length` octets; the rest is zeros already. */
static void put(uint8_t *to, const char *text, size_t length)
{
    memcpy(to, text, strnlen(text, length));
}

static void put_octal(uint8_t *to, int digits, uint64_t value)
{
    char number[24];
    snprintf(number, sizeof number, "%0*llo", digits, (unsigned long long)value);
    memcpy(to, number, (size_t)digits); /* the callers' values fit */
}

static void ustar(uint8_t block[TAR_BLOCK], const struct tar_member *member, const char *name, int cut)
{
    memset(block, 0, TAR_BLOCK);
    if (cut > 0)
        memcpy(block + 345, name, (size_t)cut);
    put(block, cut > 0 ? name + cut + 1 : name, 100);
    put_octal(block + 100, 7, member->mode & 07777);
    put_octal(block + 108, 7, member->uid <= MAX_OCTAL_7 ? member->uid : 0);
    put_octal(block + 116, 7, member->gid <= MAX_OCTAL_7 ? member->gid : 0);
    put_octal(block + 124, 11, member->size >> 33 ? 0 : member->size);
    put_octal(block + 136, 11, member->mtime < 0 || member->mtime >> 33 ? 0 : (uint64_t)member->mtime);
    block[156] = (uint8_t)member->type;
    put(block + 157, member->target, 100);
    memcpy(block + 257, "ustar\0" "00", 8);
    put(block + 265, member->user, 32);
    put(block + 297, member->group, 32);
    put_octal(block + 329, 7, 0);
    put_octal(block + 337, 7, 0);
    memset(block + CHECK, ' ', 8);
    unsigned sum = 0;
    for (int i = 0; i < TAR_BLOCK; i++)
        sum += block[i];
    put_octal(block + CHECK, 6, sum);
    block[CHECK + 6] = 0;
}

size_t tar_format(const struct tar_member *member, uint8_t out[TAR_HEADER_ROOM])
{
    struct records records = {(char *)out + TAR_BLOCK, 0, TAR_HEADER_ROOM - 2 * TAR_BLOCK};
    char name[TAR_NAME + 1];
    size_t length = strlen(member->name);
    bool slash = member->type == TAR_FOLDER && length > 0 && member->name[length - 1] != '/';
    if (length + slash >= TAR_NAME || strlen(member->target) >= TAR_NAME)
        return 0;
    memcpy(name, member->name, length);
    strcpy(name + length, slash ? "/" : "");
    int cut = cut_of(name);
    bool long_name = cut < 0 || !is_ascii(name), long_target = strlen(member->target) > 100 || !is_ascii(member->target);
    if ((long_name && !is_utf8(name)) || (long_target && !is_utf8(member->target)))
        record(&records, "hdrcharset", "BINARY");
    if (long_name)
        record(&records, "path", name);
    if (long_target)
        record(&records, "linkpath", member->target);
    if (member->size >> 33)
        record_number(&records, "size", (int64_t)member->size);
    if (member->mtime < 0 || member->mtime >> 33)
        record_number(&records, "mtime", member->mtime);
    if (member->uid > MAX_OCTAL_7)
        record_number(&records, "uid", member->uid);
    if (member->gid > MAX_OCTAL_7)
        record_number(&records, "gid", member->gid);
    size_t at = 0;
    if (records.length > 0) {
        static const struct tar_member extension = {.mode = 0644};
        struct tar_member header = extension;
        header.type = (enum tar_type)'x';
        header.size = records.length;
        ustar(out, &header, "PaxHeader", 0);
        at = TAR_BLOCK + records.length;
        memset(out + at, 0, tar_padding(records.length));
        at += tar_padding(records.length);
    }
    ustar(out + at, member, name, cut > 0 ? cut : 0);
    return at + TAR_BLOCK;
}
