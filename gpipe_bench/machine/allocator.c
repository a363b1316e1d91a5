/* See allocator.h. */

#include "allocator.h"

#define MIB ((int64_t)1 << 20)
#define SMALL MIB                 /* largest block of a small pool */
#define SMALL_SEGMENT (2 * MIB)
#define LARGE_SEGMENT (20 * MIB)
#define OWN_SEGMENT (10 * MIB)    /* from here on a block has a segment of its own */
#define ROUND_LARGE (2 * MIB)

/* --- segments ----------------------------------------------------------------------------------------------------- */

static int64_t segment_length(int64_t size) {
    if (size <= SMALL)
        return SMALL_SEGMENT;
    return size < OWN_SEGMENT ? LARGE_SEGMENT : (size + ROUND_LARGE - 1) / ROUND_LARGE * ROUND_LARGE;
}

/* Give whole segments of a pool back to the device; gives their bytes. */
static int64_t shrink(Allocators *all, Pool *pool) {
    int64_t kept = 0, units = 0;
    for (int64_t place = 0; place < pool->count; place++) {
        const Free *one = &pool->items[place];
        const Block *block = &all->blocks.items[one->block];
        if (block->before == NONE && block->after == NONE) {
            units += one->units;
            LEAVE_PLACE(all->blocks, after, one->block);
        } else {
            pool->items[kept++] = *one;
        }
    }
    pool->count = kept;
    return units * UNIT;
}

/* Free what waits for events, then give whole segments back. Whoever runs the host lets it wait for the device. */
static void flush(Allocators *all, int32_t number) {
    Device *device = &all->devices[number];
    device->use.flushes++;
    for (Event *event = all->events.items; event < all->events.items + all->events.count; event++) {
        int32_t block = event->block;
        if (block != NONE && all->pools[all->blocks.items[block].pool].device == number) {
            event->block = NONE;
            give_block(all, block);
        }
    }
    for (int32_t pool = device->first_pool; pool != NONE; pool = all->pools[pool].next)
        device->use.reserved -= shrink(all, &all->pools[pool]);
}

/* Add a segment for a block of `size` bytes to a pool; 0 if the device is full, flushed and still full. */
static int add_segment(Allocators *all, int32_t pool, int64_t size) {
    int32_t number = all->pools[pool].device;
    Device *device = &all->devices[number];
    int64_t length = segment_length(size);
    if (device->capacity && device->use.reserved + length > device->capacity) {
        flush(all, number);
        if (device->use.reserved + length > device->capacity) {
            all->shortage = (MemoryShortage){number, length, device->use.reserved, device->capacity};
            return 0;
        }
    }
    device->use.reserved += length;
    if (device->use.reserved > device->use.peak_reserved)
        device->use.peak_reserved = device->use.reserved;
    int32_t block;
    TAKE_PLACE(all->blocks, after, block);
    all->blocks.items[block] = (Block){device->next_address, length / UNIT, .before = NONE, .after = NONE, .pool = pool};
    device->next_address += length;
    give_block(all, block);
    return 1;
}

/* Place of the free block that the allocator chooses, if need be of a new segment; NONE: the device is full. */
static int64_t choose(Allocators *all, int32_t number, int64_t units) {
    const Pool *pool = &all->pools[number];
    int64_t place = first_from(pool->items, pool->count, units, 0);
    if (place < pool->count)
        return place;
    if (!add_segment(all, number, units * UNIT))
        return NONE;
    return first_from(pool->items, pool->count, units, 0);
}

/* --- requests ----------------------------------------------------------------------------------------------------- */

static int32_t pool_of(int32_t stream, int64_t units) {
    return 2 * stream + (units * UNIT > SMALL);
}

static void count(MemoryUse *use, int64_t live, int64_t allocated) {
    use->live += live;
    use->allocated += allocated;
    if (use->live > use->peak_live)
        use->peak_live = use->live;
    if (use->allocated > use->peak_allocated)
        use->peak_allocated = use->allocated;
}

int32_t allocate(Allocators *all, int32_t stream, int64_t bytes) {
    int64_t units = rounded(bytes) / UNIT;
    int32_t number = pool_of(stream, units);
    int64_t place = choose(all, number, units);
    if (place == NONE)
        return NONE;
    int32_t block = take_block(all, &all->pools[number], place, units);
    Block *one = &all->blocks.items[block];
    one->slack = (uint32_t)(one->units * UNIT - bytes);
    one->holders = 1;
    one->uses = NONE;
    count(&all->devices[all->pools[number].device].use, bytes, one->units * UNIT);
    return block;
}

int allocate_briefly(Allocators *all, int32_t stream, int64_t bytes) {
    int64_t units = rounded(bytes) / UNIT;
    int32_t number = pool_of(stream, units);
    int64_t place = choose(all, number, units);
    if (place == NONE)
        return 0;
    const Pool *pool = &all->pools[number];
    int64_t found = pool->items[place].units;
    int64_t size = (found - units < pool->keep ? found : units) * UNIT;
    MemoryUse *use = &all->devices[all->pools[number].device].use;
    count(use, bytes, size);
    use->live -= bytes;
    use->allocated -= size;
    return 1;
}

void discount(Allocators *all, int32_t device, int64_t live, int64_t allocated) {
    MemoryUse *use = &all->devices[device].use;
    use->live += live;
    use->allocated += allocated;
}

/* Take a block back that others used: it waits for what is pending on their streams. */
static void await_uses(Allocators *all, int32_t block) {
    int32_t event, next;
    TAKE_PLACE(all->events, pending, event);
    all->events.items[event] = (Event){block, 1};
    for (int32_t use = all->blocks.items[block].uses; use != NONE; use = next) {
        all->events.items[event].pending += all->record(all->context, all->uses.items[use].stream, event);
        next = all->uses.items[use].next;
        LEAVE_PLACE(all->uses, next, use);
    }
    event_passed(all, event);
}

void drop(Allocators *all, int32_t block) {
    Block *one = &all->blocks.items[block];
    if (--one->holders)
        return;
    MemoryUse *use = &all->devices[all->pools[one->pool].device].use;
    use->live -= one->units * UNIT - one->slack;
    use->allocated -= one->units * UNIT;
    if (one->uses == NONE) {
        give_block(all, block);
    } else {
        await_uses(all, block);
    }
}

void use_on_stream(Allocators *all, int32_t block, int32_t stream) {
    Block *one = &all->blocks.items[block];
    if (one->pool / 2 == stream)
        return;
    for (int32_t use = one->uses; use != NONE; use = all->uses.items[use].next)
        if (all->uses.items[use].stream == stream)
            return;
    int32_t use;
    TAKE_PLACE(all->uses, next, use);
    all->uses.items[use] = (Use){stream, one->uses};
    one->uses = use;
}

void event_passed(Allocators *all, int32_t event) {
    Event *passed = &all->events.items[event];
    int32_t block = passed->block;
    if (--passed->pending)
        return;
    passed->block = NONE;
    LEAVE_PLACE(all->events, pending, event);
    if (block != NONE)
        give_block(all, block);
}

/* --- life --------------------------------------------------------------------------------------------------------- */

void allocators_begin(Allocators *all, int32_t devices, const int64_t *device_of, int32_t streams, int64_t capacity) {
    all->stream_count = streams;
    all->devices = zeros(devices, sizeof(Device));
    all->pools = zeros(2 * (int64_t)streams, sizeof(Pool));
    all->blocks.unused = all->uses.unused = all->events.unused = NONE;
    for (int32_t device = 0; device < devices; device++) {
        all->devices[device].capacity = capacity;
        all->devices[device].first_pool = NONE;
    }
    for (int32_t number = 2 * streams - 1; number >= 0; number--) {
        Pool *pool = &all->pools[number];
        pool->device = (int32_t)device_of[number / 2];
        pool->keep = (uint32_t)(number % 2 ? SMALL / UNIT + 1 : 1);
        pool->next = all->devices[pool->device].first_pool;
        all->devices[pool->device].first_pool = number;
    }
}

void allocators_end(Allocators *all) {
    for (int64_t pool = 0; pool < 2 * (int64_t)all->stream_count; pool++)
        free(all->pools[pool].items);
    free(all->pools);
    free(all->devices);
    free(all->blocks.items);
    free(all->uses.items);
    free(all->events.items);
}
