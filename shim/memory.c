/* Capture and injection of the private pages of the VMM's memory. */
#include "shim.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>

enum {
	PAGE = 4096,
	BUFFER = 1 << 20,
	SCAN = 1 << 16,      /* pagemap entries read at once: 512 KiB */
	RUNS = 1 << 20,      /* runs kept: 16 MiB */
	PIECES = 256,        /* remote pieces of one transfer */
	MAPS_LINE = 4608,
	HEADER = 32,
};

#define PRESENT (1ull << 63)
#define SWAPPED (1ull << 62)
#define OF_FILE (1ull << 61)

static const char magic[8] = "HWCAP1\0";

/* The VMM's view of the file: `size` octets at `start`. */
struct mapping {
	uint64_t start, size;
};

static bool fault(struct memory_error *error, const char *code, const char *what)
{
	error->code = code;
	return failed_errno(error->text, "%s", what);
}

static bool refuse(struct memory_error *error, const char *code, const char *what)
{
	error->code = code;
	return failed(error->text, "%s", what);
}

typedef bool (*area_visitor)(const struct area *area, void *context);

/* Calls `visit` for every line of PID/maps until it returns false. */
static bool walk_maps(int proc_fd, pid_t pid, area_visitor visit, void *context)
{
	char path[32], line[MAPS_LINE];
	snprintf(path, sizeof path, "%d/maps", (int)pid);
	int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
	FILE *file = fd < 0 ? NULL : fdopen(fd, "r");
	if (file == NULL)
		return false;
	while (fgets(line, sizeof line, file)) {
		struct area area;
		if (area_parse(line, &area) && !visit(&area, context))
			break;
	}
	fclose(file);
	return true;
}

struct probe {
	uint64_t address;
	struct area found;
};

static bool is_probe(const struct area *area, void *context)
{
	struct probe *probe = context;
	if (area->start != probe->address)
		return true;
	probe->found = *area;
	return false;
}

struct search {
	struct area like;
	struct mapping mapping;
	bool shared, scattered;
};

static bool is_match(const struct area *area, void *context)
{
	struct search *search = context;
	struct mapping *mapping = &search->mapping;
	if (area->inode != search->like.inode || area->major != search->like.major || area->minor != search->like.minor)
		return true;
	search->shared |= !area->private;
	if (mapping->size == 0) {
		mapping->start = area->start;
		search->scattered |= area->offset != 0;
	} else {
		search->scattered |= area->start != mapping->start + mapping->size || area->offset != mapping->size;
	}
	mapping->size += area->end - area->start;
	return true;
}

/* Maps show a file by numbers that fstat gives differently on some file systems; so we map it ourselves and look. */
static bool find_mapping(int proc_fd, pid_t pid, int map_fd, struct mapping *mapping, struct memory_error *error)
{
	struct probe probe = {0};
	struct search search = {0};
	void *own = mmap(NULL, PAGE, PROT_READ, MAP_PRIVATE, map_fd, 0);
	if (own == MAP_FAILED)
		return fault(error, "invalid", "mapping the file");
	probe.address = (uint64_t)(uintptr_t)own;
	bool seen = walk_maps(proc_fd, getpid(), is_probe, &probe);
	munmap(own, PAGE);
	if (!seen || probe.found.inode == 0)
		return refuse(error, "unsupported", "the shim's own mappings cannot be read");
	search.like = probe.found;
	if (!walk_maps(proc_fd, pid, is_match, &search))
		return fault(error, "denied", "mappings of the VMM");
	if (search.mapping.size == 0)
		return refuse(error, "unmapped", "the VMM has not mapped that file");
	if (search.shared)
		return refuse(error, "shared", "the VMM has mapped that file shared: its pages are in the file");
	struct stat stat;
	/* Beyond the file's end there is no memory, but a list of pages as long as an address space can be. */
	if (fstat(map_fd, &stat) < 0 || search.mapping.size > ((uint64_t)stat.st_size + PAGE - 1) / PAGE * PAGE)
		return refuse(error, "unsupported", "the VMM has mapped more than there is of that file");
	if (search.scattered)
		return refuse(error, "unsupported", "the VMM has mapped that file in several places");
	*mapping = search.mapping;
	return true;
}

static bool scan(int proc_fd, pid_t pid, const struct mapping *mapping, struct runs *runs, struct memory_error *error)
{
	char path[32];
	snprintf(path, sizeof path, "%d/pagemap", (int)pid);
	int fd = openat(proc_fd, path, O_RDONLY | O_CLOEXEC);
	uint64_t *entry = malloc(SCAN * sizeof *entry);
	bool good = fd >= 0 && entry != NULL;
	uint64_t total = mapping->size / PAGE, first = mapping->start / PAGE;
	for (uint64_t at = 0; good && at < total;) {
		uint64_t want = total - at < SCAN ? total - at : SCAN;
		ssize_t got = pread(fd, entry, want * sizeof *entry, (off_t)((first + at) * sizeof *entry));
		if (got <= 0 || got % (ssize_t)sizeof *entry) {
			good = false;
			break;
		}
		uint64_t count = (uint64_t)got / sizeof *entry;
		for (uint64_t i = 0; i < count; i++) {
			if (!(entry[i] & (PRESENT | SWAPPED)) || (entry[i] & OF_FILE))
				continue;
			uint64_t begin = i;
			while (i + 1 < count && (entry[i + 1] & (PRESENT | SWAPPED)) && !(entry[i + 1] & OF_FILE))
				i++;
			runs_add(runs, at + begin, i - begin + 1);
		}
		at += count;
	}
	if (!good)
		fault(error, "denied", "page map of the VMM");
	free(entry);
	if (fd >= 0)
		close(fd);
	return good;
}

static bool write_all(int fd, const void *data, size_t length)
{
	for (const char *at = data; length > 0;) {
		ssize_t put = write(fd, at, length);
		if (put < 0 && errno == EINTR)
			continue;
		if (put <= 0)
			return false;
		at += put;
		length -= (size_t)put;
	}
	return true;
}

static bool read_all(int fd, void *data, size_t length, uint64_t offset)
{
	for (char *at = data; length > 0;) {
		ssize_t got = pread(fd, at, length, (off_t)offset);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0) {
			errno = got == 0 ? ENODATA : errno;
			return false;
		}
		at += got;
		offset += (uint64_t)got;
		length -= (size_t)got;
	}
	return true;
}

/* Takes pieces of runs, from `*run` and `*done` pages into it on, for one buffer; returns how many octets. */
static size_t gather(const struct run *run, size_t runs, size_t *at, uint64_t *done, const struct mapping *mapping,
                     struct iovec *piece, int *pieces)
{
	size_t length = 0;
	for (*pieces = 0; *at < runs && *pieces < PIECES && length < BUFFER; (*pieces)++) {
		uint64_t left = (run[*at].pages - *done) * PAGE;
		size_t take = left < BUFFER - length ? (size_t)left : BUFFER - length;
		piece[*pieces] = (struct iovec){(void *)(uintptr_t)(mapping->start + (run[*at].first + *done) * PAGE), take};
		length += take;
		*done += take / PAGE;
		if (*done == run[*at].pages) {
			(*at)++;
			*done = 0;
		}
	}
	return length;
}

bool memory_capture(int proc_fd, pid_t pid, int map_fd, int out_fd, struct transfer *done, struct memory_error *error)
{
	struct mapping mapping;
	struct runs runs;
	if (!find_mapping(proc_fd, pid, map_fd, &mapping, error))
		return false;
	char *buffer = malloc(BUFFER);
	bool good = runs_init(&runs, RUNS);
	if (!good || buffer == NULL)
		good = refuse(error, "exhausted", "no memory for the list of pages");
	else
		good = scan(proc_fd, pid, &mapping, &runs, error);
	if (good) {
		uint64_t head[HEADER / 8] = {0, PAGE, mapping.size, runs.count};
		memcpy(head, magic, sizeof magic);
		if (!write_all(out_fd, head, sizeof head) || !write_all(out_fd, runs.run, runs.count * sizeof *runs.run))
			good = fault(error, "io", "writing the capture");
	}
	size_t at = 0;
	uint64_t within = 0;
	while (good && at < runs.count) {
		struct iovec piece[PIECES], local = {buffer, 0};
		int pieces;
		local.iov_len = gather(runs.run, runs.count, &at, &within, &mapping, piece, &pieces);
		if (process_vm_readv(pid, &local, 1, piece, (unsigned long)pieces, 0) != (ssize_t)local.iov_len)
			good = fault(error, "denied", "reading the VMM's memory");
		else if (!write_all(out_fd, buffer, local.iov_len))
			good = fault(error, "io", "writing the capture");
	}
	*done = (struct transfer){runs.pages, runs.count, runs.pages * PAGE};
	free(buffer);
	runs_free(&runs);
	return good;
}

/* Checks that runs ascend and stay within the mapping; returns the sum of their pages through `pages`. */
static bool sound(const struct run *run, size_t count, uint64_t total, uint64_t *next, uint64_t *pages)
{
	for (size_t i = 0; i < count; i++) {
		if (run[i].pages == 0 || run[i].first < *next || run[i].first >= total || run[i].pages > total - run[i].first)
			return false;
		*next = run[i].first + run[i].pages;
		*pages += run[i].pages;
	}
	return true;
}

bool memory_inject(int proc_fd, pid_t pid, int map_fd, int in_fd, struct transfer *done, struct memory_error *error)
{
	enum { BATCH = 4096 };
	struct mapping mapping;
	uint64_t head[HEADER / 8];
	if (!find_mapping(proc_fd, pid, map_fd, &mapping, error))
		return false;
	if (!read_all(in_fd, head, sizeof head, 0))
		return fault(error, "io", "reading the capture");
	if (memcmp(head, magic, sizeof magic) != 0 || head[1] != PAGE || head[2] != mapping.size || head[3] > RUNS)
		return refuse(error, "invalid", "not a capture of a mapping of this size");
	struct run *run = malloc(BATCH * sizeof *run);
	char *buffer = malloc(BUFFER);
	bool good = run != NULL && buffer != NULL;
	if (!good)
		refuse(error, "exhausted", "no memory for the transfer");
	uint64_t table = HEADER, data = HEADER + head[3] * sizeof *run, next = 0;
	*done = (struct transfer){.runs = head[3]};
	for (uint64_t left = head[3]; good && left > 0;) {
		size_t count = left < BATCH ? (size_t)left : BATCH, at = 0;
		uint64_t within = 0;
		if (!read_all(in_fd, run, count * sizeof *run, table))
			good = fault(error, "io", "reading the capture");
		else if (!sound(run, count, mapping.size / PAGE, &next, &done->pages))
			good = refuse(error, "invalid", "the capture's list of pages is not in order");
		while (good && at < count) {
			struct iovec piece[PIECES], local = {buffer, 0};
			int pieces;
			local.iov_len = gather(run, count, &at, &within, &mapping, piece, &pieces);
			if (!read_all(in_fd, buffer, local.iov_len, data))
				good = fault(error, "io", "reading the capture");
			else if (process_vm_writev(pid, &local, 1, piece, (unsigned long)pieces, 0) != (ssize_t)local.iov_len)
				good = fault(error, "denied", "writing the VMM's memory");
			data += local.iov_len;
		}
		table += count * sizeof *run;
		left -= count;
	}
	done->bytes = done->pages * PAGE;
	free(run);
	free(buffer);
	return good;
}
