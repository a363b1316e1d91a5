/* The free blocks of a pool, in the order in which the allocator chooses, and how blocks merge and split. */

#include <string.h>

#include "allocator.h"

static void remove_at(Pool *pool, int64_t place) {
    pool->count--;
    memmove(pool->items + place, pool->items + place + 1, (size_t)(pool->count - place) * sizeof(Free));
}

/* The free block at `place` is smaller now, or new: move it down to where it belongs. */
static void move_down(Pool *pool, int64_t place, Free one) {
    int64_t target = first_from(pool->items, place, one.units, one.address);
    memmove(pool->items + target + 1, pool->items + target, (size_t)(place - target) * sizeof(Free));
    pool->items[target] = one;
}

/* The free block at `place` has grown: move it up to where it belongs. */
static void move_up(Pool *pool, int64_t place, Free one) {
    Free *above = pool->items + place + 1;
    int64_t passed = first_from(above, pool->count - place - 1, one.units, one.address);
    memmove(pool->items + place, above, (size_t)passed * sizeof(Free));
    pool->items[place + passed] = one;
}

static int64_t place_of(const Pool *pool, const Block *block) {
    return first_from(pool->items, pool->count, block->units, block->address);
}

/* Let a block end where its neighbour ends, which is one no longer. */
static void join(Allocators *all, int32_t first, int32_t second) {
    Block *blocks = all->blocks.items;
    int32_t after = blocks[first].after = blocks[second].after;
    blocks[first].units += blocks[second].units;
    if (after != NONE)
        blocks[after].before = first;
    LEAVE_PLACE(all->blocks, after, second);
}

void give_block(Allocators *all, int32_t block) {
    Block *blocks = all->blocks.items;
    Pool *pool = &all->pools[blocks[block].pool];
    int32_t before = blocks[block].before, after = blocks[block].after;
    int64_t place = NONE;
    if (after != NONE && blocks[after].holders == FREE) {
        place = place_of(pool, &blocks[after]);
        join(all, block, after);
    }
    if (before != NONE && blocks[before].holders == FREE) {
        if (place != NONE)
            remove_at(pool, place);
        place = place_of(pool, &blocks[before]);
        join(all, before, block);
        block = before;
    }
    blocks[block].holders = FREE;
    Free entry = {blocks[block].address, blocks[block].units, block};
    if (place != NONE) {
        move_up(pool, place, entry);
    } else {
        GROW(*pool);
        move_down(pool, pool->count++, entry);
    }
}

int32_t take_block(Allocators *all, Pool *pool, int64_t place, int64_t units) {
    int32_t found = pool->items[place].block;
    if (pool->items[place].units - units < pool->keep) {
        remove_at(pool, place);
        return found;
    }
    int32_t block;
    TAKE_PLACE(all->blocks, after, block);
    Block *rest = &all->blocks.items[found], *one = &all->blocks.items[block];
    *one = (Block){rest->address, units, .before = rest->before, .after = found, .pool = rest->pool};
    if (rest->before != NONE)
        all->blocks.items[rest->before].after = block;
    rest->before = block;
    rest->address += units * UNIT;
    rest->units -= units;
    move_down(pool, place, (Free){rest->address, rest->units, found});
    return block;
}
