/* Bounded byte queues with stream offsets, made of chunks from shared pools: what a process wrote until the host has it, and
   what the host sent until the process takes it. */
#ifndef HW_RING_H
#define HW_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "proto.h"

enum {
    RING_CHUNKS = (OUTPUT_BYTES + CHUNK - 1) / CHUNK + 1,
    RING_VECTORS = 65,
    SPARE_CHUNKS = 64, /* a pool of which nothing is in use may keep the pages of so many */
};

/* Chunks that rings share. A ring that has none gets one out of a reserve, so that rings which nobody empties cannot starve the others. */
struct pool {
    uint8_t *memory;
    uint16_t *free; /* stack of chunk numbers: the last one freed is used next, so that few pages are touched */
    uint32_t total, available, reserve;
    uint32_t fresh; /* chunks from this one on were never used since the memory was last given back */
};

struct ring {
    struct pool *pool;
    uint32_t bound;       /* octets kept at most, <= OUTPUT_BYTES */
    uint64_t base, end;   /* stream offsets: octets base..end are kept */
    uint16_t first, count; /* chunks in use: slots first.. (mod RING_CHUNKS) */
    uint16_t slots[RING_CHUNKS];
};

/* Reserves address space for `total` chunks; false when there is no memory. */
bool pool_open(struct pool *pool, uint32_t total, uint32_t reserve);
void pool_close(struct pool *pool);
/* Nothing is in use, and more pages than need be are held. Between two parts of a flood that is so all the time: to give them back then
   costs a fault for each page of the next part. */
bool pool_spare(const struct pool *pool);
/* Gives the pages back, if pool_spare(). */
void pool_rest(struct pool *pool);

void ring_open(struct ring *ring, struct pool *pool, uint32_t bound);
/* Drops the content and gives the chunks back; the offsets stay. */
void ring_drop(struct ring *ring);

static inline uint64_t ring_used(const struct ring *ring) { return ring->end - ring->base; }

/* Up to `want` octets of room as vectors; 0 vectors when the bound is reached or the pool has nothing to give.
   `*starved` says that it was the pool. */
int ring_room(struct ring *ring, size_t want, struct iovec vectors[RING_VECTORS], bool *starved);
/* Octets were put into ring_room()'s vectors, in order. */
void ring_produced(struct ring *ring, size_t count);
/* Counts octets that went past an empty ring. */
void ring_pass(struct ring *ring, size_t count);
/* Copies all of data if it fits (then true). */
bool ring_put(struct ring *ring, const uint8_t *data, size_t count);
/* The octets from base on, as vectors. */
int ring_kept(const struct ring *ring, struct iovec vectors[RING_VECTORS]);
/* The contiguous octets at an offset in base..end. */
const uint8_t *ring_at(const struct ring *ring, uint64_t offset, size_t *count);
/* Forgets the octets before `offset` (clamped to base..end). */
void ring_free_to(struct ring *ring, uint64_t offset);

#endif
