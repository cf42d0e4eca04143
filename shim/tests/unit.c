/* Parsers and lists of the shim, under the address and undefined-behaviour sanitizers. */
#include "../shim.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define CHECK(what) \
	do { \
		if (!(what)) { \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #what); \
			exit(1); \
		} \
	} while (0)

static char error[ERROR_BYTES];

static bool parse(struct config *config, const char *first, const char *second)
{
	char *words[] = {(char *)first, (char *)second};
	return config_parse(config, second ? 2 : 1, words, error);
}

static void refused(const char *first, const char *second)
{
	struct config config;
	config_init(&config);
	if (parse(&config, first, second)) {
		fprintf(stderr, "accepted: %s %s\n", first, second ? second : "");
		exit(1);
	}
	CHECK(error[0] != 0);
}

static void arguments(void)
{
	struct config c;
	config_init(&c);
	char *words[] = {"--id",     "abcdefghij0123456789", "--uid",    "1900000007", "--gid",  "1900000007", "--generation", "42",
	                 "--pass",   "20:30",                "--pass",   "21:10",      "--tap",  "12",         "--dev",        "kvm",
	                 "--nofile", "64",                   "--fsize",  "4096",       "--park", "--network",  "--peer-uid",   "5",
	                 "--report-fd", "3", "--control-fd", "4", "--root-fd", "5", "--argv-fd", "6", "--env-fd", "7"};
	CHECK(config_parse(&c, sizeof words / sizeof words[0], words, error));
	CHECK(!strcmp(c.id, words[1]) && c.uid == 1900000007 && c.generation == 42 && c.passes == 2 && c.pass[1].from == 21);
	CHECK(c.tap_to == 12 && c.devices == 1 && c.park && c.network && c.peers == 1 && c.peer[0] == 5);
	CHECK(!config_complete(&c, error)); /* --tap, and no tap was made */
	c.tap_fd = 9;
	CHECK(config_complete(&c, error));
	c.uid = 0;
	CHECK(!config_complete(&c, error));
	CHECK(!parse(&c, "--pass", "22:10")); /* twice the same number in the VMM */
	CHECK(!parse(&c, "--pass", "22:12"));
	refused("--id", "ABCDEFGHIJ0123456789");
	refused("--id", "abcdefghij012345678");
	refused("--id", "../../../../../../ab");
	refused("--uid", "4294967295");
	refused("--uid", "-1");
	refused("--uid", "");
	refused("--uid", "18446744073709551616");
	refused("--uid", NULL);
	refused("--pass", "20");
	refused("--pass", "20:9");
	refused("--pass", "20:256");
	refused("--pass", ":30");
	refused("--pass", "200000000:30");
	refused("--dev", "mem");
	refused("--dev", "../dev/kvm");
	refused("--nofile", "63");
	refused("--root-fd", "420");
	refused("--what", "1");
	refused("--network", "1");
	config_init(&c);
	for (int i = 0; i < MAX_CGROUPS; i++)
		CHECK(parse(&c, "--cgroup-fd", "8"));
	CHECK(!parse(&c, "--cgroup-fd", "8"));
}

static int file_of(const char *data, size_t size)
{
	int fd = memfd_create("strings", 0);
	CHECK(fd >= 0 && write(fd, data, size) == (ssize_t)size);
	return fd;
}

static void strings(void)
{
	int fd = file_of("/vmm\0-m\0\0", 9);
	char **list = read_strings(fd, "x", error);
	CHECK(list && !strcmp(list[0], "/vmm") && !strcmp(list[1], "-m") && !strcmp(list[2], "") && list[3] == NULL);
	free(list[0]);
	free(list);
	close(fd);
	fd = file_of("", 0);
	list = read_strings(fd, "x", error);
	CHECK(list && list[0] == NULL);
	free(list);
	close(fd);
	fd = file_of("/vmm", 4); /* no NUL at the end */
	CHECK(read_strings(fd, "x", error) == NULL);
	close(fd);
	static char many[2 * (MAX_STRINGS + 1)];
	for (size_t i = 0; i < sizeof many; i += 2)
		many[i] = 'a';
	fd = file_of(many, sizeof many);
	CHECK(read_strings(fd, "x", error) == NULL);
	close(fd);
	CHECK(read_strings(0x7fff, "x", error) == NULL);
}

static void requests(void)
{
	struct request r;
	CHECK(request_parse("status", 6, &r) && !strcmp(r.verb, "status") && !r.has_value);
	CHECK(request_parse("capture map=20", 14, &r) && !strcmp(r.key, "map") && r.has_value && r.value == 20);
	const char *bad[] = {"", " ", "STATUS", "status ", "capture map", "capture map=", "capture map=x", "capture =1",
	                     "capture  map=1", "capture map=1 ", "averyveryverylongverb", "capture map=99999999999999999999"};
	for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
		CHECK(!request_parse(bad[i], strlen(bad[i]), &r));
	CHECK(!request_parse("status\0x", 8, &r));
	/* Any octets: nothing is read beyond the end (the copy is as short as the request). */
	srand(7);
	for (int i = 0; i < 200000; i++) {
		size_t length = (size_t)(rand() % 24);
		char *copy = malloc(length ? length : 1);
		for (size_t k = 0; k < length; k++)
			copy[k] = "ab =9z\0\xff"[rand() % 8];
		request_parse(copy, length, &r);
		free(copy);
	}
}

static void file_numbers(void)
{
	const struct {
		const char *text;
		int number;
	} cases[] = {
	        {"/hatchway/20", 20}, {"/hatchway/1", 1},    {"/hatchway/255", 255}, {"/hatchway/256", -1}, {"/hatchway/0", -1},
	        {"/hatchway/", -1},   {"/hatchway/020", -1}, {"/hatchway/20/", -1},  {"/hatchway/2x", -1},  {"hatchway/20", -1},
	        {"/hatchway", -1},    {"", -1},              {"/etc/passwd", -1},    {"/hatchway/-1", -1},  {"/hatchway/99999999999", -1},
	};
	for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
		CHECK(file_number(cases[i].text, strlen(cases[i].text) + 1) == cases[i].number);
	CHECK(file_number("/hatchway/20", 12) == -1); /* what was read has no end */
	CHECK(file_number("", 0) == -1);
}

static void tails(void)
{
	static char room[LOG_BYTES];
	static struct tail tail = {.bytes = room, .room = sizeof room};
	char text[LOG_BYTES], big[3 * LOG_BYTES];
	tail_add(&tail, "hello", 5);
	CHECK(tail_copy(&tail, text) == 5 && !memcmp(text, "hello", 5));
	for (size_t i = 0; i < sizeof big; i++)
		big[i] = (char)('a' + i % 23);
	tail_add(&tail, big, LOG_BYTES - 3);
	CHECK(tail_copy(&tail, text) == LOG_BYTES && !memcmp(text, "llo", 3) && !memcmp(text + 3, big, LOG_BYTES - 3));
	tail_add(&tail, big, sizeof big);
	CHECK(tail_copy(&tail, text) == LOG_BYTES && !memcmp(text, big + sizeof big - LOG_BYTES, LOG_BYTES));
	CHECK(tail.total == 5 + LOG_BYTES - 3 + sizeof big);
}

static void page_runs(void)
{
	struct runs runs;
	CHECK(runs_init(&runs, 8));
	runs_add(&runs, 0, 1);
	runs_add(&runs, 1, 2); /* touches */
	runs_add(&runs, 5, 1);
	CHECK(runs.count == 2 && runs.run[0].pages == 3 && runs.pages == 4);
	/* However scattered: bounded, ascending, and every page that was added is in it. */
	runs.count = 0, runs.pages = 0, runs.gap = 0;
	for (uint64_t i = 0; i < 1000; i++)
		runs_add(&runs, i * i, 1);
	uint64_t sum = 0, next = 0;
	for (size_t i = 0; i < runs.count; i++) {
		CHECK(runs.run[i].first >= next);
		next = runs.run[i].first + runs.run[i].pages;
		sum += runs.run[i].pages;
	}
	CHECK(runs.count <= 8 && sum == runs.pages);
	for (uint64_t i = 0; i < 1000; i++) {
		bool found = false;
		for (size_t k = 0; k < runs.count; k++)
			found |= i * i >= runs.run[k].first && i * i < runs.run[k].first + runs.run[k].pages;
		CHECK(found);
	}
	runs_free(&runs);
}

static void areas(void)
{
	struct area area;
	CHECK(area_parse("7f0000000000-7f0010000000 rw-p 00001000 fe:01 1234567890123   /a b (deleted)\n", &area));
	CHECK(area.start == 0x7f0000000000 && area.end == 0x7f0010000000 && area.offset == 0x1000 && area.major == 0xfe &&
	      area.minor == 1 && area.inode == 1234567890123 && area.private);
	CHECK(area_parse("1000-2000 rw-s 0 00:1 7", &area) && !area.private);
	CHECK(!area_parse("2000-1000 rw-s 0 00:1 7", &area));
	CHECK(!area_parse("", &area) && !area_parse("x-y", &area));
}

int main(void)
{
	arguments();
	strings();
	requests();
	file_numbers();
	tails();
	page_runs();
	areas();
	puts("shim unit tests passed");
	return 0;
}
