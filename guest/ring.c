#include "ring.h"

#include <string.h>
#include <sys/mman.h>

bool pool_open(struct pool *pool, uint32_t total, uint32_t reserve)
{
    size_t octets = (size_t)total * (CHUNK + sizeof pool->free[0]);
    void *memory = mmap(NULL, octets, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    *pool = (struct pool){.memory = memory, .total = total, .available = total, .reserve = reserve};
    pool->free = (uint16_t *)(void *)(pool->memory + (size_t)total * CHUNK);
    return true;
}

void pool_close(struct pool *pool)
{
    munmap(pool->memory, (size_t)pool->total * (CHUNK + sizeof pool->free[0]));
}

static bool pool_take(struct pool *pool, bool first, uint16_t *chunk)
{
    if (pool->available == 0 || (!first && pool->available <= pool->reserve))
        return false;
    uint32_t recycled = pool->available - (pool->total - pool->fresh);
    *chunk = recycled ? pool->free[recycled - 1] : (uint16_t)pool->fresh++;
    pool->available--;
    return true;
}

static void pool_give(struct pool *pool, uint16_t chunk)
{
    uint32_t recycled = pool->available - (pool->total - pool->fresh);
    pool->free[recycled] = chunk;
    pool->available++;
}

bool pool_spare(const struct pool *pool)
{
    return pool->available == pool->total && pool->fresh > SPARE_CHUNKS;
}

void pool_rest(struct pool *pool)
{
    if (!pool_spare(pool))
        return;
    madvise(pool->memory, (size_t)pool->fresh * CHUNK, MADV_DONTNEED);
    pool->fresh = 0;
}

void ring_open(struct ring *ring, struct pool *pool, uint32_t bound)
{
    *ring = (struct ring){.pool = pool, .bound = bound};
}

void ring_drop(struct ring *ring)
{
    while (ring->count) {
        pool_give(ring->pool, ring->slots[ring->first]);
        ring->first = (uint16_t)((ring->first + 1) % RING_CHUNKS);
        ring->count--;
    }
    ring->base = ring->end;
}

/* Offset of the first octet of the first chunk: chunks stand at multiples of CHUNK of the stream. */
static uint64_t chunk_floor(uint64_t offset)
{
    return offset - offset % CHUNK;
}

static uint8_t *chunk_at(const struct ring *ring, uint64_t offset)
{
    uint64_t index = (offset - chunk_floor(ring->base)) / CHUNK;
    return ring->pool->memory + (size_t)ring->slots[(ring->first + index) % RING_CHUNKS] * CHUNK + offset % CHUNK;
}

int ring_room(struct ring *ring, size_t want, struct iovec vectors[RING_VECTORS], bool *starved)
{
    *starved = false;
    uint64_t left = ring->bound - ring_used(ring);
    if (want > left)
        want = (size_t)left;
    int count = 0;
    uint64_t offset = ring->end;
    while (want > 0 && count < RING_VECTORS) {
        uint64_t index = (offset - chunk_floor(ring->base)) / CHUNK;
        if (index >= ring->count) {
            uint16_t chunk;
            if (ring->count >= RING_CHUNKS)
                break;
            if (!pool_take(ring->pool, ring->count == 0, &chunk)) {
                *starved = count == 0;
                break;
            }
            ring->slots[(ring->first + ring->count) % RING_CHUNKS] = chunk;
            ring->count++;
        }
        size_t part = (size_t)(CHUNK - offset % CHUNK);
        if (part > want)
            part = want;
        vectors[count].iov_base = chunk_at(ring, offset);
        vectors[count].iov_len = part;
        count++;
        offset += part;
        want -= part;
    }
    return count;
}

/* Gives back the chunks that hold nothing: a whole one is kept only between octets. */
static void trim(struct ring *ring)
{
    uint64_t needed = ring_used(ring) == 0 ? 0 : (ring->end - 1 - chunk_floor(ring->base)) / CHUNK + 1;
    while (ring->count > needed) {
        ring->count--;
        pool_give(ring->pool, ring->slots[(ring->first + ring->count) % RING_CHUNKS]);
    }
}

void ring_produced(struct ring *ring, size_t count)
{
    ring->end += count;
    trim(ring);
}

void ring_pass(struct ring *ring, size_t count)
{
    ring->end += count;
    ring->base = ring->end;
}

bool ring_put(struct ring *ring, const uint8_t *data, size_t count)
{
    if (count > ring->bound - ring_used(ring))
        return false;
    while (count > 0) {
        struct iovec vectors[RING_VECTORS];
        bool starved;
        int n = ring_room(ring, count, vectors, &starved);
        if (n == 0)
            return false;
        size_t done = 0;
        for (int i = 0; i < n; i++) {
            memcpy(vectors[i].iov_base, data + done, vectors[i].iov_len);
            done += vectors[i].iov_len;
        }
        ring_produced(ring, done);
        data += done;
        count -= done;
    }
    return true;
}

const uint8_t *ring_at(const struct ring *ring, uint64_t offset, size_t *count)
{
    size_t part = (size_t)(CHUNK - offset % CHUNK);
    if (part > ring->end - offset)
        part = (size_t)(ring->end - offset);
    *count = part;
    return part ? chunk_at(ring, offset) : NULL;
}

int ring_kept(const struct ring *ring, struct iovec vectors[RING_VECTORS])
{
    int count = 0;
    for (uint64_t offset = ring->base; offset < ring->end && count < RING_VECTORS; count++) {
        vectors[count].iov_base = chunk_at(ring, offset);
        ring_at(ring, offset, &vectors[count].iov_len);
        offset += vectors[count].iov_len;
    }
    return count;
}

void ring_free_to(struct ring *ring, uint64_t offset)
{
    if (offset > ring->end)
        offset = ring->end;
    if (offset <= ring->base)
        return;
    uint64_t whole = (chunk_floor(offset) - chunk_floor(ring->base)) / CHUNK;
    for (; whole > 0 && ring->count > 0; whole--) {
        pool_give(ring->pool, ring->slots[ring->first]);
        ring->first = (uint16_t)((ring->first + 1) % RING_CHUNKS);
        ring->count--;
    }
    ring->base = offset;
    trim(ring);
}
