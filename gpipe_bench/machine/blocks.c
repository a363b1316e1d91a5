/* The blocks of a trace in the caching allocators of the devices: see allocator.h. */

#include "allocator.h"
#include "replay.h"

struct BlockTable {
    Allocators all;
    int64_t devices;
    int64_t first, count; /* numbers of blocks that the trace allocates */
    int32_t *held;        /* by number from the first on: the allocator's block, or NONE */
    MemoryShortage shortage; /* the first; of no capacity: there was none */
    VECTOR(TraceRow) without; /* allocations of scratch memory that failed */
};

BlockTable *blocks_new(const ReplayInput *input, const int64_t *device_of, int32_t streams, MemoryRecord *record,
                       void *context) {
    BlockTable *blocks = zeros(1, sizeof(BlockTable));
    int64_t last = 0;
    blocks->first = INT64_MAX;
    for (const TraceRow *row = input->rows; row < input->rows + input->count; row++) {
        if (row->kind == ROW_alloc) {
            blocks->first = row->block < blocks->first ? row->block : blocks->first;
            last = row->block > last ? row->block : last;
        }
    }
    blocks->count = last ? last + 1 - blocks->first : 0;
    blocks->held = zeros(blocks->count, sizeof(int32_t));
    for (int64_t place = 0; place < blocks->count; place++) {
        blocks->held[place] = NONE;
    }
    blocks->devices = input->devices;
    allocators_begin(&blocks->all, (int32_t)input->devices, device_of, streams, input->capacity);
    blocks->all.record = record;
    blocks->all.context = context;
    return blocks;
}

void blocks_end(BlockTable *blocks) {
    allocators_end(&blocks->all);
    free(blocks->held);
    free(blocks->without.items);
    free(blocks);
}

Allocators *blocks_allocators(BlockTable *blocks) {
    return &blocks->all;
}

/* Where a block is noted; NULL if it is from before the trace. */
static int32_t *place_of(BlockTable *blocks, int64_t block) {
    int64_t place = block - blocks->first;
    return place >= 0 && place < blocks->count ? &blocks->held[place] : NULL;
}

/* Whether a kernel gets no scratch memory: there was none for another one like it, or its device holds too much. */
static bool does_without(const BlockTable *blocks, const TraceRow *row, const Device *device) {
    if (row->scratch && device->capacity && device->use.reserved > device->capacity) {
        return true;
    }
    for (int64_t place = 0; row->scratch && place < blocks->without.count; place++) {
        const TraceRow *other = &blocks->without.items[place];
        if (other->device == row->device && other->bytes == row->bytes) {
            return true;
        }
    }
    return false;
}

/* Gives a full device a block beyond its capacity. */
static int32_t exceed(BlockTable *blocks, const TraceRow *row, int32_t stream, Device *device) {
    int64_t capacity = device->capacity;
    if (!blocks->shortage.capacity) {
        blocks->shortage = blocks->all.shortage;
    }
    device->capacity = 0;
    int32_t made = allocate(&blocks->all, stream, row->bytes);
    device->capacity = capacity;
    return made;
}

bool blocks_alloc(BlockTable *blocks, const TraceRow *row, int32_t stream) {
    Device *device = &blocks->all.devices[blocks->all.pools[2 * stream].device];
    int64_t flushes = device->use.flushes;
    if (does_without(blocks, row, device)) {
        return false;
    }
    int32_t made = allocate(&blocks->all, stream, row->bytes);
    if (made == NONE && !row->scratch) {
        made = exceed(blocks, row, stream, device);
    } else if (made == NONE) {
        PUSH(blocks->without, *row);
    }
    *place_of(blocks, row->block) = made;
    return device->use.flushes > flushes;
}

void blocks_told(BlockTable *blocks) {
    for (Device *device = blocks->all.devices; device < blocks->all.devices + blocks->devices; device++) {
        MemoryUse *use = &device->use;
        int64_t *peaks[] = {&use->peak_live, &use->peak_allocated, &use->peak_reserved};
        for (int peak = 0; device->capacity && peak < 3; peak++) {
            *peaks[peak] = *peaks[peak] < device->capacity ? *peaks[peak] : device->capacity;
        }
    }
    blocks->shortage = (MemoryShortage){0};
}

void blocks_release(BlockTable *blocks, int64_t block) {
    int32_t *held = place_of(blocks, block);
    if (held != NULL && *held != NONE) {
        drop(&blocks->all, *held);
        *held = NONE;
    }
}

void blocks_use(BlockTable *blocks, int64_t block, int32_t stream) {
    const int32_t *held = place_of(blocks, block);
    if (held != NULL && *held != NONE) {
        use_on_stream(&blocks->all, *held, stream);
    }
}

void blocks_count(const BlockTable *blocks, int32_t device, MemoryUse *use) {
    *use = blocks->all.devices[device].use;
}

void blocks_shortage(const BlockTable *blocks, MemoryShortage *shortage) {
    *shortage = blocks->shortage;
}
