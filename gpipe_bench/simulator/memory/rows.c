/* Rows of blocks: every task makes some and drops them soon. Short ones are cut out of chunks, and used again. */

#include "state.h"

enum { CHUNK = 1 << 16 };

/* Bytes of a row; rows are pointers' neighbours, so they are multiples of theirs. */
static int64_t size_of(int64_t count) {
    return (int64_t)sizeof(Row) + (count + 1) / 2 * 2 * (int64_t)sizeof(int32_t);
}

/* Cut a row out of the newest chunk, or out of another one if little is left. */
static Row *cut(RowPool *pool, int64_t size) {
    if (pool->left < size) {
        GROW(pool->chunks);
        pool->chunks.items[pool->chunks.count++] = zeros(CHUNK, 1);
        pool->left = CHUNK;
    }
    pool->left -= size;
    return (Row *)(pool->chunks.items[pool->chunks.count - 1] + pool->left);
}

Row *new_row(Memory *memory, int64_t count) {
    RowPool *pool = &memory->rows;
    Row *row;
    if (count > SHORT_ROW) {
        row = zeros(1, size_of(count));
    } else if (pool->unused[count] != NULL) {
        row = pool->unused[count];
        pool->unused[count] = row->next;
    } else {
        row = cut(pool, size_of(count));
    }
    row->count = count;
    return row;
}

void free_row(Memory *memory, Row **row) {
    Row *old = *row;
    *row = NULL;
    if (old == NULL)
        return;
    if (old->count > SHORT_ROW) {
        free(old);
        return;
    }
    Row **unused = &memory->rows.unused[old->count];
    old->next = *unused;
    *unused = old;
}

void drop_row(Memory *memory, Row **row) {
    for (int64_t place = 0; *row != NULL && place < (*row)->count; place++) {
        if ((*row)->items[place] != NONE)
            drop(&memory->all, (*row)->items[place]);
    }
    free_row(memory, row);
}

void rows_end(RowPool *pool) {
    for (int64_t chunk = 0; chunk < pool->chunks.count; chunk++)
        free(pool->chunks.items[chunk]);
    free(pool->chunks.items);
}
