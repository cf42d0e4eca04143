/* Runs of pages, and lines of /proc/PID/maps. */
#include "shim.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

bool runs_init(struct runs *runs, size_t limit)
{
	*runs = (struct runs){.limit = limit, .run = malloc(limit * sizeof(struct run))};
	return runs->run != NULL;
}

void runs_free(struct runs *runs)
{
	free(runs->run);
	runs->run = NULL;
}

/* Joins neighbours until a quarter of the list is free. The pages between them are still what the parent has, so that
 * writing them out too changes the size of a capture and not its meaning. */
static void compact(struct runs *runs)
{
	while (runs->count > runs->limit / 4 * 3) {
		runs->gap = runs->gap ? runs->gap * 2 : 1;
		size_t kept = 0;
		for (size_t i = 1; i < runs->count; i++) {
			struct run *last = &runs->run[kept], next = runs->run[i];
			uint64_t between = next.first - (last->first + last->pages);
			if (between <= runs->gap) {
				last->pages += between + next.pages;
				runs->pages += between;
			} else {
				runs->run[++kept] = next;
			}
		}
		runs->count = kept + 1;
	}
}

void runs_add(struct runs *runs, uint64_t first, uint64_t pages)
{
	if (runs->count > 0) {
		struct run *last = &runs->run[runs->count - 1];
		uint64_t between = first - (last->first + last->pages);
		if (between <= runs->gap) {
			last->pages += between + pages;
			runs->pages += between + pages;
			return;
		}
	}
	if (runs->count == runs->limit)
		compact(runs);
	runs->run[runs->count++] = (struct run){first, pages};
	runs->pages += pages;
}

bool area_parse(const char *line, struct area *area)
{
	char rights[5] = {0};
	if (sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %" SCNx64 " %x:%x %" SCNu64, &area->start, &area->end, rights, &area->offset,
	           &area->major, &area->minor, &area->inode) != 7)
		return false;
	area->private = rights[3] == 'p';
	return area->start < area->end;
}
