/* Hostile archives for the reader of tar, and honest ones for both ends: what was written is read as it was. With clang a libFuzzer target
   (HW_LIBFUZZER); else main() makes its own inputs: `tar SECONDS SEED`. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "../files/tar.h"
#include "../tests/check.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static struct tar_reader reader;

/* What holds of every member, whatever the archive was. */
static void check_member(void)
{
    static char name[TAR_NAME];
    const struct tar_member *member = &reader.member;
    CHECK(memchr(member->name, 0, sizeof member->name) && memchr(member->target, 0, sizeof member->target));
    CHECK(member->size <= INT64_MAX - TAR_BLOCK && member->mode <= 07777 && member->mtime_ns < 1000000000);
    CHECK(member->type == TAR_FILE || member->type == TAR_NOTHING || member->size == 0);
    strcpy(name, member->name);
    if (!tar_clean(name))
        return;
    CHECK(strlen(name) <= strlen(member->name) && name[0] != '/');
    for (const char *at = name; *at;) {
        size_t length = strcspn(at, "/");
        CHECK(length > 0 && !(length <= 2 && memcmp(at, "..", length) == 0));
        at += length;
        CHECK(*at == 0 || at[1] != 0);
        at += *at == '/';
    }
    static char again[TAR_NAME];
    strcpy(again, name);
    CHECK(tar_clean(again) && strcmp(again, name) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    memset(&reader, 0, sizeof reader);
    for (size_t at = 0; size - at >= TAR_BLOCK;) {
        enum tar_step step = tar_read(&reader, data + at);
        at += TAR_BLOCK;
        if (step == TAR_END || step == TAR_BAD || step == TAR_UNSUPPORTED) {
            CHECK(step == TAR_END || reader.why);
            break;
        }
        if (step != TAR_MEMBER)
            continue;
        check_member();
        uint64_t blocks = (reader.member.size + TAR_BLOCK - 1) / TAR_BLOCK;
        if (blocks > (size - at) / TAR_BLOCK)
            break;
        at += (size_t)blocks * TAR_BLOCK;
    }
    tar_may_end(&reader);
    return 0;
}

#ifndef HW_LIBFUZZER

void __sanitizer_set_death_callback(void (*callback)(void));

static uint64_t state;
static unsigned long long current;

static uint32_t roll(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32) % below;
}

static void make_text(char *to, size_t most)
{
    static const char *const parts[] = {"a", "/", "..", ".", "name", "\xc3\xa9", "\xff", "=", "\n", " ", "12345678901234567890"};
    size_t length = 0;
    for (uint32_t i = roll(roll(4) ? 12 : 300); i > 0; i--) {
        const char *part = parts[roll(sizeof parts / sizeof parts[0])];
        if (length + strlen(part) >= most)
            break;
        strcpy(to + length, part);
        length += strlen(part);
    }
    to[length] = 0;
}

static void make_member(struct tar_member *member)
{
    memset(member, 0, sizeof *member);
    member->type = (enum tar_type)"0123456"[roll(7)];
    member->size = member->type != TAR_FILE ? 0 : roll(4) ? roll(3000) : (uint64_t)roll(1u << 31) << roll(24);
    member->mode = roll(010000);
    member->uid = roll(4) ? roll(2000) : roll(UINT32_MAX);
    member->gid = roll(4) ? roll(2000) : roll(UINT32_MAX);
    member->mtime = roll(4) ? roll(1u << 31) : ((int64_t)roll(1u << 31) << roll(8)) - (1ll << 36);
    make_text(member->name, sizeof member->name - 1);
    if (member->type == TAR_HARD_LINK || member->type == TAR_SYMLINK)
        make_text(member->target, sizeof member->target);
}

/* What was written says the same when it is read. */
static void check_round_trip(const struct tar_member *member, const uint8_t *header, size_t length)
{
    size_t name_length = strlen(member->name);
    bool slash = name_length > 0 && member->name[name_length - 1] == '/';
    enum tar_step step = TAR_MORE;
    memset(&reader, 0, sizeof reader);
    CHECK(length % TAR_BLOCK == 0);
    for (size_t at = 0; at < length; at += TAR_BLOCK) {
        CHECK_EQUAL(step, TAR_MORE);
        step = tar_read(&reader, header + at);
    }
    CHECK_EQUAL(step, TAR_MEMBER);
    const struct tar_member *read = &reader.member;
    CHECK(strncmp(read->name, member->name, name_length) == 0);
    CHECK(read->name[name_length] == 0 || (member->type == TAR_FOLDER && strcmp(read->name + name_length, "/") == 0));
    CHECK(strcmp(read->target, member->target) == 0);
    CHECK(read->type == member->type || (member->type == TAR_FILE && slash && read->type == TAR_FOLDER));
    CHECK(read->mode == member->mode && read->uid == member->uid && read->gid == member->gid);
    CHECK(read->mtime == member->mtime && (read->type == TAR_FOLDER || read->size == member->size));
}

static void on_death(void)
{
    fprintf(stderr, "the failing input is the first one of seed %llu\n", current);
}

static void on_abort(int signal)
{
    on_death();
    _Exit(128 + signal);
}

int main(int argc, char **argv)
{
    static uint8_t input[1 << 18];
    static struct tar_member member;
    time_t end = time(NULL) + (argc > 1 ? atoi(argv[1]) : 10);
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    unsigned long inputs = 0;
    __sanitizer_set_death_callback(on_death);
    signal(SIGABRT, on_abort);
    for (; time(NULL) < end; inputs++) {
        current = seed + inputs;
        state = current * 0x9e3779b97f4a7c15u + 1;
        size_t size = 0;
        for (uint32_t i = 1 + roll(5); i > 0; i--) {
            make_member(&member);
            size_t length = tar_format(&member, input + size), data = (size_t)(member.size + tar_padding(member.size));
            CHECK(length > 0 || member.type == TAR_FOLDER);
            if (length == 0)
                continue;
            check_round_trip(&member, input + size, length);
            size += length;
            if (member.size <= 3000) {
                memset(input + size, (int)roll(256), data);
                size += data;
            }
        }
        memset(input + size, 0, 2 * TAR_BLOCK);
        size += 2 * TAR_BLOCK;
        for (uint32_t i = roll(6); i > 0; i--) {
            size_t at = roll((uint32_t)size) / TAR_BLOCK * TAR_BLOCK, where = at + roll(TAR_BLOCK);
            input[where] = roll(2) ? (uint8_t)"0179\0 =\n/.xgLKSV\xff\x80"[roll(18)] : (uint8_t)roll(256);
            unsigned sum = 0;
            for (unsigned k = 0; k < TAR_BLOCK; k++)
                sum += k >= 148 && k < 156 ? ' ' : input[at + k];
            if (roll(4)) /* mostly a header whose sum holds */
                snprintf((char *)input + at + 148, 8, "%06o", sum & 0777777);
        }
        LLVMFuzzerTestOneInput(input, roll(3) ? size : roll((uint32_t)size));
    }
    printf("fuzz: %lu archives from seed %llu, no failure\n", inputs, (unsigned long long)seed);
    return inputs == 0;
}

#endif
