/* The CUDA caching allocator of every device, by its documented rules (c10/cuda/CUDACachingAllocator.cpp).

   size     rounded up to 512 B
   pools    up to 1 MiB: segments of 2 MiB; below 10 MiB: segments of 20 MiB; larger: a segment of its own size, rounded
            up to 2 MiB. Each stream has its own free blocks
   choice   the smallest free block that is large enough, then the lowest address
   split    if at least 512 B (small pool) or more than 1 MiB (large pool) would be left over
   free     merges with free neighbours of its segment; a block that other streams used is free only when what was
            queued on them has run
   full     free blocks that are whole segments go back to the device, then it tries again */

#ifndef GPIPE_BENCH_ALLOCATOR_H
#define GPIPE_BENCH_ALLOCATOR_H

#include "grow.h"
#include "memory.h"

enum { NONE = -1, FREE = -1 };

#define UNIT ((int64_t)512)

/* A piece of a segment: in use, free, or waiting until other streams no longer use it. */
typedef struct {
    int64_t address;        /* ascending, in the order in which segments were made */
    int64_t units;          /* size in units of 512 bytes */
    uint32_t slack;         /* bytes that its holder did not ask for */
    int32_t before, after;  /* neighbours in its segment; NONE at the ends */
    int32_t pool;           /* where it is free: twice its stream, plus one if it is large */
    int32_t holders;        /* how many hold it; 0: it waits for events; -1: it is free */
    int32_t uses;           /* other streams that used it: a place in Allocators.uses, or NONE */
} Block;

/* A free block in the sorted row of its pool. */
typedef struct {
    int64_t address, units;
    int32_t block;
} Free;

/* The free blocks of one stream and one class of sizes, in the order in which the allocator chooses. */
typedef struct {
    Free *items;
    uint32_t count, room;
    uint32_t keep;   /* least units that are split off */
    int32_t device;
    int32_t next;    /* next pool of the same device, or NONE */
} Pool;

/* What a device has in use. */
typedef struct {
    MemoryUse use;
    int64_t capacity;      /* bytes; 0 for no limit */
    int64_t next_address;
    int64_t flushes_seen;  /* those that a Holder has told of */
    int32_t first_pool;
} Device;

/* A stream that used a block, and another one. */
typedef struct {
    int32_t stream, next;
} Use;

/* A block waits for operations. */
typedef struct {
    int32_t block;   /* NONE if a flush has freed it, or if the event is unused */
    int32_t pending; /* operations that have not ended; of an unused event the next one */
} Event;

struct Allocators {
    int32_t stream_count;
    Device *devices;
    Pool *pools;             /* two for each stream */
    PLACES(Block) blocks;
    PLACES(Use) uses;
    PLACES(Event) events;
    MemoryRecord *record;
    void *context;
    MemoryShortage shortage;
};

/* Allocators of some devices; `device_of`: the device of each stream. */
void allocators_begin(Allocators *all, int32_t devices, const int64_t *device_of, int32_t streams, int64_t capacity);
void allocators_end(Allocators *all);

/* A block of `bytes` on a stream, held once; NONE if the device is full, flushed and still full. */
int32_t allocate(Allocators *all, int32_t stream, int64_t bytes);

/* Allocate and free at once, which leaves the free blocks as they are; 0 if the device is full. */
int allocate_briefly(Allocators *all, int32_t stream, int64_t bytes);

/* One holder less; the last one frees the block. */
void drop(Allocators *all, int32_t block);

/* Note that `stream` uses a block that may belong to another one. */
void use_on_stream(Allocators *all, int32_t block, int32_t stream);

/* Change what counts as in use, apart from any request: by bytes that were asked for, and as the allocator rounds. */
void discount(Allocators *all, int32_t device, int64_t live, int64_t allocated);

/* Place of the first free block that has at least `units`, and of those with as many, not below `address`. */
static inline int64_t first_from(const Free *items, int64_t count, int64_t units, int64_t address) {
    const Free *base = items;
    while (count > 0) {
        int64_t half = count / 2;
        const Free *middle = base + half;
        int less = middle->units < units || (middle->units == units && middle->address < address);
        base = less ? middle + 1 : base;
        count = less ? count - half - 1 : half;
    }
    return base - items;
}

/* Make a block free; it merges with free neighbours. */
void give_block(Allocators *all, int32_t block);

/* Take the free block at `place`, or as much of its beginning as is asked for. */
int32_t take_block(Allocators *all, Pool *pool, int64_t place, int64_t units);

/* One more holds the block. */
static inline int32_t hold(Allocators *all, int32_t block) {
    all->blocks.items[block].holders++;
    return block;
}

/* Bytes that the holder of a block asked for. */
static inline int64_t requested(const Allocators *all, int32_t block) {
    const Block *found = &all->blocks.items[block];
    return found->units * UNIT - found->slack;
}

/* Bytes that a request takes. */
static inline int64_t rounded(int64_t bytes) {
    return bytes > 0 ? (bytes + 511) / 512 * 512 : 512;
}

#endif
