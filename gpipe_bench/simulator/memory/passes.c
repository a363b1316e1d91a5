/* Runs the requests of a pass, one by one. */

#include "state.h"

/* Memory for one kernel; once there is none, kernels of its kind do without (Conv.cpp, chooseAlgorithm). */
static void scratch(Memory *memory, int64_t kind, int32_t stream, int64_t bytes) {
    if (!memory->without[kind] && !allocate_briefly(&memory->all, stream, bytes))
        memory->without[kind] = 1;
}

/* Whether what was lent is in use no longer once the pass does not need it. Checkpoints keep what they took and what
   came, tasks of a schedule the latter, unless it is handed over. */
static int goes(const Memory *memory, const Kind *kind, int64_t name, Way way) {
    int32_t block = memory->lent[name];
    if (!way.is_open || block == NONE || memory->all.blocks.items[block].holders != 1)
        return 0;
    int is_gradient = name % 2;
    return !memory->given.scheduled || !is_gradient || kind->hands_over;
}

int run_rows(Memory *memory, const Kind *kind, int64_t j, Numbers rows, Way way) {
    Allocators *all = &memory->all;
    int32_t *table = memory->table, stream = (int32_t)memory->partitions[j].stream;
    int32_t device = (int32_t)memory->partitions[j].device;
    /* Bytes that count as in use no more until whoever lent them gives them back. */
    int64_t live = 0, allocated = 0;
    for (const int64_t *row = rows.items; row < rows.items + rows.count; row += 2) {
        int64_t slot = row[0] >> CODE_BITS, bytes = row[1];
        int drops = 1;
        switch (row[0] & ((1 << CODE_BITS) - 1)) {
        case ROW_ALLOC:
            drops = 0;
            table[slot] = allocate(all, stream, bytes);
            if (table[slot] == NONE)
                return MEMORY_FULL;
            break;
        case ROW_DROP:
            break;
        case ROW_BRIEF:
            drops = 0;
            if (!allocate_briefly(all, stream, bytes))
                return MEMORY_FULL;
            break;
        case ROW_SCRATCH:
            drops = 0;
            scratch(memory, slot, stream, bytes);
            break;
        case ROW_LET_GO:
            drops = 0;
            if (goes(memory, kind, slot, way)) {
                int64_t wanted = requested(all, memory->lent[slot]);
                discount(all, device, -wanted, -rounded(wanted));
                live += wanted;
                allocated += rounded(wanted);
            }
            break;
        case ROW_VIEW:
            if (way.is_summed && !allocate_briefly(all, stream, bytes))
                return MEMORY_FULL;
            drops = !way.is_made;
            break;
        case ROW_GRADIENT:
            drops = !way.is_made;
            break;
        case ROW_LEAVING:
            drops = !way.keeps;
            break;
        case ROW_KEPT:
            drops = way.keeps;
            break;
        }
        if (drops)
            drop(all, table[slot]);
    }
    discount(all, device, live, allocated);
    return MEMORY_OK;
}
