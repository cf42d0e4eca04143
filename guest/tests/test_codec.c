/* Frames, fields, rings and accounts: everything that needs no process. */
#include <string.h>

#include "../fields.h"
#include "../frame.h"
#include "../ring.h"
#include "../user.h"
#include "check.h"

static struct frame_parser parser;

static void feed(const void *data, size_t count)
{
    const uint8_t *from = data;
    while (count > 0) {
        size_t room;
        uint8_t *to = frame_space(&parser, &room);
        CHECK(room > 0);
        size_t part = count < room ? count : room;
        memcpy(to, from, part);
        frame_commit(&parser, part);
        from += part;
        count -= part;
    }
}

static void fresh(void)
{
    memset(&parser, 0, sizeof parser);
}

static size_t make(uint8_t *to, uint8_t type, uint32_t stream, const char *payload)
{
    memcpy(to + FRAME_HEADER, payload, strlen(payload));
    return frame_finish(to, type, 0, stream, (uint32_t)strlen(payload));
}

static void frame_bytes_are_those_of_the_document(void)
{
    uint8_t frame[64];
    size_t length = make(frame, T_PING, 0x01020304, "ab");
    CHECK_EQUAL(length, 22);
    static const uint8_t wanted[] = {'H', 'W', 'F', '1', 16, 0};
    CHECK(memcmp(frame, wanted, sizeof wanted) == 0);
    static const uint8_t rest[] = {4, 3, 2, 1, 2, 0, 0, 0, 'a', 'b', 0xa5, 0x5a, 0xc3, 0x3c};
    CHECK(memcmp(frame + 8, rest, sizeof rest) == 0);
    unsigned sum1 = 0, sum2 = 0; /* Fletcher-16 step by step */
    for (int i = 0; i < 16; i++) {
        sum1 = (sum1 + (i == 6 || i == 7 ? 0 : frame[i])) % 255;
        sum2 = (sum2 + sum1) % 255;
    }
    CHECK_EQUAL(frame[6], sum1);
    CHECK_EQUAL(frame[7], sum2);
}

static void frames_split_at_every_octet_are_found(void)
{
    uint8_t stream[128];
    size_t length = make(stream, T_PING, 1, "hello");
    length += make(stream + length, T_SYNC, 2, "");
    for (size_t cut = 0; cut <= length; cut++) {
        struct frame frame;
        unsigned found = 0;
        fresh();
        feed(stream, cut);
        while (frame_next(&parser, &frame))
            CHECK_EQUAL(frame.stream, ++found);
        feed(stream + cut, length - cut);
        while (frame_next(&parser, &frame))
            CHECK_EQUAL(frame.stream, ++found);
        CHECK_EQUAL(found, 2);
        CHECK_EQUAL(parser.dropped, 0);
    }
}

static void damage_at_any_octet_loses_that_frame_only(void)
{
    uint8_t stream[256];
    size_t first = make(stream, T_PING, 1, "hello");
    size_t length = first + make(stream + first, T_SYNC, 2, "x");
    for (size_t at = 0; at < first; at++) {
        struct frame frame;
        if (at >= FRAME_HEADER && at < first - FRAME_TRAILER)
            continue; /* payloads carry no check of their own */
        fresh();
        stream[at] ^= 0x11;
        feed(stream, length);
        stream[at] ^= 0x11;
        CHECK(frame_next(&parser, &frame));
        CHECK_EQUAL(frame.stream, 2);
        CHECK(!frame_next(&parser, &frame));
        CHECK_EQUAL(parser.dropped, first);
    }
}

static void zeros_end_a_half_frame_and_its_payload_is_not_searched(void)
{
    static uint8_t zeros[FRAME_MAX], large[FRAME_MAX];
    uint8_t inner[64], hello[64];
    size_t inner_length = make(inner, T_SHUTDOWN, 66, "");
    memcpy(large + FRAME_HEADER + 100, inner, inner_length); /* what a user may write to a process's stdin */
    size_t length = frame_finish(large, T_INPUT, 0, 5, FRAME_MAX_PAYLOAD);
    size_t hello_length = make(hello, T_HELLO, 0, "v");
    for (size_t cut = 1; cut < length; cut = cut < 300 || cut > length - 8 ? cut + 1 : cut + 9973) {
        struct frame frame;
        fresh();
        feed(large, cut);
        while (frame_next(&parser, &frame))
            CHECK(false);
        for (size_t done = 0; done < sizeof zeros; done += 1000) {
            feed(zeros, sizeof zeros - done < 1000 ? sizeof zeros - done : 1000);
            CHECK(!frame_next(&parser, &frame));
        }
        feed(hello, hello_length);
        CHECK(frame_next(&parser, &frame));
        CHECK_EQUAL(frame.type, T_HELLO);
        CHECK(!frame_next(&parser, &frame));
    }
}

static void hostile_lengths_and_noise_are_hunted_through(void)
{
    uint8_t bad[FRAME_HEADER], good[64];
    struct frame frame;
    memset(bad, 0, sizeof bad);
    memcpy(bad, "HWF1", 4);
    put_u32(bad + 12, FRAME_MAX_PAYLOAD + 1);
    put_u16(bad + 6, frame_check(bad)); /* well-formed but for the length */
    size_t length = make(good, T_PING, 9, "");
    fresh();
    feed("HHWHWFHWF", 9);
    feed(bad, sizeof bad);
    feed("HWF1HWF1", 8);
    feed(good, length);
    CHECK(frame_next(&parser, &frame));
    CHECK_EQUAL(frame.stream, 9);
    CHECK_EQUAL(parser.dropped, 9 + sizeof bad + 8);
}

static void largest_frames_back_to_back(void)
{
    static uint8_t large[FRAME_MAX];
    struct frame frame;
    size_t length = frame_finish(large, T_INPUT, 0, 5, FRAME_MAX_PAYLOAD);
    unsigned found = 0;
    fresh();
    for (int i = 0; i < 5; i++) {
        for (size_t done = 0; done < length;) {
            size_t room;
            uint8_t *to = frame_space(&parser, &room);
            size_t part = length - done < room ? length - done : room;
            memcpy(to, large + done, part);
            frame_commit(&parser, part);
            done += part;
            while (frame_next(&parser, &frame))
                found++;
        }
    }
    CHECK_EQUAL(found, 5);
    CHECK_EQUAL(parser.dropped, 0);
}

static void fields_there_and_back(void)
{
    uint8_t octets[128];
    char text[8];
    uint32_t small;
    uint64_t big;
    struct field_writer writer = {octets, octets + sizeof octets, false};
    write_u32(&writer, F_FLAGS, 7);
    write_u64(&writer, F_SIZE, 1ull << 40);
    write_text(&writer, F_KEY, "key");
    write_bytes(&writer, 999, NULL, 0);
    CHECK(!writer.full);
    struct field_reader reader = fields_of(octets, (size_t)(writer.at - octets));
    struct field field;
    CHECK(field_next(&reader, &field) && field.tag == F_FLAGS && field_u32(&field, &small) && small == 7);
    CHECK(!field_u64(&field, &big) && !field_text(&field, text, sizeof text));
    CHECK(field_next(&reader, &field) && field_u64(&field, &big) && big == 1ull << 40);
    CHECK(field_next(&reader, &field) && field_text(&field, text, sizeof text) && strcmp(text, "key") == 0);
    CHECK(!field_text(&field, text, 3));
    CHECK(field_next(&reader, &field) && field.tag == 999 && field.length == 0);
    CHECK(!field_next(&reader, &field) && !reader.bad);
}

static void fields_that_lie_about_their_length(void)
{
    uint8_t octets[16] = {27, 0, 0xff, 0xff, 0xff, 0xff, 1, 2};
    struct field field;
    struct field_reader reader = fields_of(octets, 8);
    CHECK(!field_next(&reader, &field) && reader.bad);
    for (size_t length = 1; length < 6; length++) {
        reader = fields_of(octets, length);
        CHECK(!field_next(&reader, &field) && reader.bad);
    }
}

static void writer_that_is_full_leaves_out_whole_fields(void)
{
    uint8_t octets[10];
    struct field_writer writer = {octets, octets + sizeof octets, false};
    write_u64(&writer, F_SIZE, 1);
    CHECK(writer.full && writer.at == octets);
}

static void ring_keeps_offsets_and_bounds(void)
{
    struct pool pool;
    struct ring ring;
    static uint8_t data[OUTPUT_BYTES];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 31 + i / 256);
    CHECK(pool_open(&pool, 200, 4));
    ring_open(&ring, &pool, OUTPUT_BYTES);
    CHECK(ring_put(&ring, data, 3000)); /* so that chunks and fills do not meet */
    ring_free_to(&ring, 3000);
    CHECK(ring_put(&ring, data, sizeof data));
    CHECK(!ring_put(&ring, data, 1));
    struct iovec vectors[RING_VECTORS];
    bool starved;
    CHECK_EQUAL(ring_room(&ring, 1, vectors, &starved), 0);
    CHECK(!starved);
    for (uint64_t at = 0; at < sizeof data;) {
        size_t count;
        const uint8_t *part = ring_at(&ring, 3000 + at, &count);
        CHECK(count > 0 && memcmp(part, data + at, count) == 0);
        at += count;
        ring_free_to(&ring, 3000 + at / 2);
    }
    ring_free_to(&ring, UINT64_MAX);
    CHECK_EQUAL(ring.base, 3000 + sizeof data);
    CHECK_EQUAL(pool.available, 200);
    ring_free_to(&ring, 5); /* backwards: nothing */
    CHECK_EQUAL(ring.base, 3000 + sizeof data);
    ring_drop(&ring);
    pool_close(&pool);
}

static void ring_gives_all_it_keeps_as_vectors(void)
{
    struct pool pool;
    struct ring ring;
    static uint8_t data[OUTPUT_BYTES];
    struct iovec vectors[RING_VECTORS];
    for (size_t i = 0; i < sizeof data; i++)
        data[i] = (uint8_t)(i * 31 + i / 256);
    CHECK(pool_open(&pool, 200, 4));
    ring_open(&ring, &pool, OUTPUT_BYTES);
    CHECK_EQUAL(ring_kept(&ring, vectors), 0);
    ring_pass(&ring, 5000); /* went past: counted, not kept */
    CHECK_EQUAL(ring.base, 5000);
    CHECK_EQUAL(ring.end, 5000);
    CHECK_EQUAL(pool.available, 200);
    CHECK(ring_put(&ring, data, sizeof data));
    for (uint64_t at = 0; at < sizeof data;) {
        int n = ring_kept(&ring, vectors);
        CHECK(n > 0 && n <= RING_VECTORS);
        for (int i = 0; i < n; i++) {
            CHECK(memcmp(vectors[i].iov_base, data + at, vectors[i].iov_len) == 0);
            at += vectors[i].iov_len;
        }
        ring_free_to(&ring, 5000 + at);
    }
    CHECK_EQUAL(pool.available, 200);
    pool_close(&pool);
}

static void a_pool_keeps_the_pages_of_a_flood_until_it_rests(void)
{
    struct pool pool;
    struct ring ring;
    static uint8_t data[OUTPUT_BYTES];
    memset(data, 7, sizeof data);
    CHECK(pool_open(&pool, 200, 4));
    ring_open(&ring, &pool, OUTPUT_BYTES);
    uint8_t held = 0;
    for (int round = 0; round < 3; round++) {
        CHECK(ring_put(&ring, data, sizeof data));
        CHECK(!pool_spare(&pool)); /* in use */
        pool_rest(&pool);
        size_t count;
        CHECK_EQUAL(*ring_at(&ring, ring.base, &count), 7);
        ring_free_to(&ring, UINT64_MAX);
        CHECK(pool_spare(&pool));
        held |= pool.memory[0];
    }
    CHECK_EQUAL(held, 7); /* between the parts nothing was given back */
    uint32_t most = pool.fresh;
    CHECK(most <= sizeof data / CHUNK + 2); /* and the same pages served all of them */
    pool_rest(&pool);
    CHECK(!pool_spare(&pool));
    CHECK_EQUAL(pool.memory[0], 0);
    CHECK(ring_put(&ring, data, 1)); /* few are kept for the next command */
    ring_drop(&ring);
    CHECK(!pool_spare(&pool));
    CHECK_EQUAL(pool.available, 200);
    pool_close(&pool);
}

static void a_starved_pool_still_gives_each_ring_one_chunk(void)
{
    struct pool pool;
    static struct ring rings[6];
    static uint8_t data[OUTPUT_BYTES];
    struct iovec vectors[RING_VECTORS];
    bool starved;
    CHECK(pool_open(&pool, 20, 5));
    for (int i = 0; i < 6; i++)
        ring_open(&rings[i], &pool, OUTPUT_BYTES);
    CHECK(!ring_put(&rings[0], data, sizeof data)); /* takes all but the reserve */
    CHECK_EQUAL(pool.available, 5);
    CHECK_EQUAL(ring_room(&rings[0], 100000, vectors, &starved), 0);
    CHECK(starved);
    for (int i = 1; i < 6; i++)
        CHECK(ring_put(&rings[i], data, CHUNK));
    CHECK(!ring_put(&rings[1], data, 1));
    ring_drop(&rings[0]);
    CHECK(ring_put(&rings[1], data, 1));
    for (int i = 1; i < 6; i++)
        ring_drop(&rings[i]);
    CHECK_EQUAL(pool.available, pool.total);
    pool_close(&pool);
}

static const char PASSWD[] = "root:x:0:0:root:/root:/bin/bash\nbroken\n:::::::\nuser:x:1000:1001:,,,:/home/user:/bin/sh\n"
                             "neg:x:-1:0::/:\nbig:x:4294967295:0::/:\nbare:x:7:8::::\nlast:x:9:9::/l:/s";
static const char GROUP[] = "root:x:0:\nsudo:x:27:bob,user\nuser:x:1001:user\nusers:x:100:use,user2,xuser\nwheel:x:10:user";

static bool find(const char *user, struct account *account)
{
    return account_find(user, PASSWD, strlen(PASSWD), GROUP, strlen(GROUP), account);
}

static void accounts_by_name_and_number(void)
{
    struct account account;
    CHECK(find("user", &account) && account.uid == 1000 && account.gid == 1001);
    CHECK(strcmp(account.home, "/home/user") == 0 && strcmp(account.shell, "/bin/sh") == 0);
    CHECK_EQUAL(account.group_count, 3);
    CHECK(account.groups[0] == 1001 && account.groups[1] == 27 && account.groups[2] == 10);
    CHECK(find("1000", &account) && strcmp(account.name, "user") == 0 && account.group_count == 3);
    CHECK(find("bare", &account) && strcmp(account.home, "/") == 0 && strcmp(account.shell, "/bin/sh") == 0);
    CHECK(find("last", &account) && account.uid == 9);
    CHECK(find("4242", &account) && account.uid == 4242 && account.gid == 4242 && strcmp(account.home, "/") == 0);
    CHECK(!find("bob", &account) && !find("neg", &account) && !find("big", &account) && !find("broken", &account));
    CHECK(!find("4294967295", &account) && !find("99999999999", &account));
    CHECK(!account_find("root", NULL, 0, NULL, 0, &account) && account_find("0", NULL, 0, NULL, 0, &account));
}

static void more_groups_than_a_process_may_have(void)
{
    static char group[64 * 200];
    struct account account;
    size_t at = 0;
    for (int i = 0; i < 200; i++)
        at += (size_t)sprintf(group + at, "g%d:x:%d:user\n", i, 2000 + i);
    CHECK(account_find("user", PASSWD, strlen(PASSWD), group, at, &account));
    CHECK_EQUAL(account.group_count, MAX_GROUPS);
}

int main(void)
{
    RUN(frame_bytes_are_those_of_the_document);
    RUN(frames_split_at_every_octet_are_found);
    RUN(damage_at_any_octet_loses_that_frame_only);
    RUN(zeros_end_a_half_frame_and_its_payload_is_not_searched);
    RUN(hostile_lengths_and_noise_are_hunted_through);
    RUN(largest_frames_back_to_back);
    RUN(fields_there_and_back);
    RUN(fields_that_lie_about_their_length);
    RUN(writer_that_is_full_leaves_out_whole_fields);
    RUN(ring_keeps_offsets_and_bounds);
    RUN(ring_gives_all_it_keeps_as_vectors);
    RUN(a_pool_keeps_the_pages_of_a_flood_until_it_rests);
    RUN(a_starved_pool_still_gives_each_ring_one_chunk);
    RUN(accounts_by_name_and_number);
    RUN(more_groups_than_a_process_may_have);
    return 0;
}
