/* Whose tensors live how long: the forward and backward passes of tasks.

   A tensor lives while somebody holds it: the micro-batch on its way, a checkpoint that will recompute from it, a graph
   that needs it for its backward pass. */

#include <string.h>

#include "state.h"

static const Way FORWARD = {0};

/* --- names -------------------------------------------------------------------------------------------------------- */

static int is_first(Numbers names, int64_t place) {
    for (int64_t before = 0; before < place; before++)
        if (names.items[before] == names.items[place])
            return 0;
    return 1;
}

/* What a name stands for while a task runs: a block of its own, or one that came to it; NONE if there is none. */
static int32_t block_named(const Memory *memory, int64_t name) {
    return name >= 0 ? memory->table[name] : name == NONE ? NONE : memory->lent[-2 - name];
}

/* Hold what goes on as it came, once for the first place that has its name. */
static void hold_passed(Memory *memory, Numbers names) {
    for (int64_t place = 0; place < names.count; place++) {
        int64_t name = names.items[place];
        if (name < NONE && is_first(names, place) && block_named(memory, name) != NONE)
            hold(&memory->all, block_named(memory, name));
    }
}

/* The block that a task gives at a place, a new one if it has no name; NONE if the device is full. */
static int32_t given_block(Memory *memory, Numbers names, int64_t j, int64_t place, int64_t bytes) {
    int32_t block = names.count ? block_named(memory, names.items[place]) : NONE;
    if (block == NONE)
        return new_on(memory, j, bytes);
    return is_first(names, place) ? block : hold(&memory->all, block);
}

/* --- what comes to a task ----------------------------------------------------------------------------------------- */

/* The blocks of a row, then some skips of micro-batch i; they are no longer where they were. */
static Row *take(Memory *memory, Row *row, int32_t *table, int64_t i, Numbers skips) {
    if (row != NULL && !skips.count)
        return row;
    int64_t own = row == NULL ? 0 : row->count;
    Row *taken = new_row(memory, own + skips.count);
    for (int64_t place = 0; place < own; place++)
        taken->items[place] = row->items[place];
    for (int64_t place = 0; place < skips.count; place++) {
        int32_t *skip = skip_at(memory, table, i, skips.items[place]);
        taken->items[own + place] = *skip;
        *skip = NONE;
    }
    free_row(memory, &row);
    return taken;
}

/* Note under their names the inputs of a task: those of the micro-batch, and the skips that end there. */
static void name_inputs(Memory *memory, int64_t j, const Row *taken) {
    const Partition *partition = &memory->partitions[j];
    int64_t riding = partition->incoming.count - partition->ending;
    for (int64_t place = 0; place < taken->count - riding; place++)
        memory->lent[2 * place] = taken->items[place];
}

/* The graph of a task keeps some of its inputs. */
static Row *lend_inputs(Memory *memory, const Kind *kind) {
    Row *lent = new_row(memory, kind->kept_inputs.count);
    for (int64_t place = 0; place < lent->count; place++) {
        int32_t block = memory->lent[2 * kind->kept_inputs.items[place]];
        lent->items[place] = block == NONE ? NONE : hold(&memory->all, block);
    }
    return lent;
}

/* Note under their names the inputs that a graph has kept, and the gradients that came. */
static void name_lent(Memory *memory, const Kind *kind, int64_t j, const Task *task) {
    for (int64_t place = 0; task->lent != NULL && place < task->lent->count; place++)
        memory->lent[2 * kind->kept_inputs.items[place]] = task->lent->items[place];
    /* The gradients of several outputs of the last partition are one block for all. */
    int is_complete = task->gradients->count == kind->outputs.count + memory->partitions[j].awaited.count;
    int is_known = task->how == FORWARD_OPEN || task->how == FORWARD_CELL || kind->passes_back;
    for (int64_t place = 0; is_complete && is_known && place < task->gradients->count; place++)
        memory->lent[2 * place + 1] = task->gradients->items[place];
}

static void forget_names(Memory *memory) {
    for (int64_t name = 0; name < memory->given.names; name++)
        memory->lent[name] = NONE;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* The first slots of the pass that has run. */
static Row *keep_table(Memory *memory, int64_t slots) {
    Row *table = new_row(memory, slots);
    memcpy(table->items, memory->table, (size_t)slots * sizeof *table->items);
    return table;
}

/* What leaves a pass with graph is kept by the graph or not; it is held once for the graph, and once if it goes on. */
static void keep_leaving(Memory *memory, const Kind *kind, Row *table, int goes_on) {
    for (int64_t slot = 0; slot < kind->kept.count; slot++) {
        if (kind->kept.items[slot] && goes_on) {
            hold(&memory->all, table->items[slot]);
        } else if (!kind->kept.items[slot] && !goes_on) {
            drop(&memory->all, table->items[slot]);
        }
    }
}

/* What a task gives goes to its micro-batch; skips that go further ride on. */
static int give_outputs(Memory *memory, const Kind *kind, int64_t i, int64_t j, const Row *taken) {
    const Partition *partition = &memory->partitions[j];
    Row *values = memory->values[i] = new_row(memory, kind->outputs.count);
    for (int64_t place = 0; place < values->count + partition->departing.count; place++) {
        int is_skip = place >= values->count;
        int64_t skip = is_skip ? partition->departing.items[place - values->count] : NONE;
        int64_t bytes = is_skip ? skip_bytes(memory, i, skip) : kind->outputs.items[place];
        int32_t block = given_block(memory, kind->leaving, j, place, bytes);
        if (block == NONE)
            return MEMORY_FULL;
        *(is_skip ? skip_at(memory, memory->passing, i, skip) : &values->items[place]) = block;
    }
    int64_t own = taken->count - partition->incoming.count;
    for (int64_t place = partition->ending; place < partition->incoming.count; place++) {
        int32_t block = hold(&memory->all, taken->items[own + place]);
        *skip_at(memory, memory->passing, i, partition->incoming.items[place]) = block;
    }
    return MEMORY_OK;
}

int memory_forward(Memory *memory, int32_t i, int32_t j, int32_t how) {
    const Kind *kind = kind_at(memory, i, j);
    Task *task = task_at(memory, i, j);
    int with_graph = how == FORWARD_OPEN || how == FORWARD_TIED;
    /* A micro-batch holds them until the pass has ended, a checkpoint until its backward pass has. */
    Row *taken = task->saved = take(memory, memory->values[i], memory->passing, i, memory->partitions[j].incoming);
    memory->values[i] = NULL;
    task->how = how;
    name_inputs(memory, j, taken);
    if (with_graph)
        task->lent = lend_inputs(memory, kind);
    if (run_rows(memory, kind, j, with_graph ? kind->graph : kind->plain, FORWARD))
        return MEMORY_FULL;
    if (with_graph) {
        task->table = keep_table(memory, kind->left);
        keep_leaving(memory, kind, task->table, 1);
    }
    hold_passed(memory, kind->leaving);
    int full = give_outputs(memory, kind, i, j, taken);
    forget_names(memory);
    return full;
}

int memory_recompute(Memory *memory, int32_t i, int32_t j) {
    const Kind *kind = kind_at(memory, i, j);
    Task *task = task_at(memory, i, j);
    if (run_rows(memory, kind, j, kind->graph, FORWARD))
        return MEMORY_FULL;
    task->table = keep_table(memory, kind->left);
    if (task->how == FORWARD_CELL || !memory->given.published)
        keep_leaving(memory, kind, task->table, 0);
    if (task->how == FORWARD_CELL) {
        /* From now on its graph alone keeps the inputs that it needs. */
        name_inputs(memory, j, task->saved);
        task->lent = lend_inputs(memory, kind);
        forget_names(memory);
        drop_row(memory, &task->saved);
    }
    return MEMORY_OK;
}

void memory_collected(Memory *memory, int32_t i, int32_t j) {
    Task *task = task_at(memory, i, j);
    if (task->how == FORWARD_OPEN || task->how == FORWARD_TIED)
        drop_row(memory, &task->saved);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* Gradients of the batch are nobody's. */
static void drop_returning(Memory *memory, Numbers names) {
    for (int64_t place = 0; place < names.count; place++) {
        int32_t block = block_named(memory, names.items[place]);
        if (block != NONE && is_first(names, place))
            drop(&memory->all, block);
    }
}

/* Gradients go to the partition before, and to where skips came from. */
static int give_gradients(Memory *memory, const Kind *kind, const Back *back, int64_t i, int64_t j) {
    const Partition *partition = &memory->partitions[j];
    for (int64_t place = 0; place < back->shared.count; place++)
        hold(&memory->all, memory->table[back->shared.items[place]]);
    if (!j) {
        drop_returning(memory, back->returning);
        return MEMORY_OK;
    }
    Row *given = task_at(memory, i, j - 1)->gradients = new_row(memory, kind->inputs.count);
    for (int64_t place = 0; place < given->count + partition->ending; place++) {
        int is_skip = place >= given->count;
        int64_t skip = is_skip ? partition->incoming.items[place - given->count] : NONE;
        int64_t bytes = is_skip ? skip_bytes(memory, i, skip) : kind->inputs.items[place];
        int32_t *target = is_skip ? skip_at(memory, memory->skip_gradients, i, skip) : &given->items[place];
        *target = NONE;
        if (is_skip ? memory->skips[skip].returns : kind->returns.items[place]) {
            *target = given_block(memory, back->returning, j, place, bytes);
            if (*target == NONE)
                return MEMORY_FULL;
        }
    }
    return MEMORY_OK;
}

/* Drop what I was the last to need of the gradients or inputs of a task. */
static void drop_early(Memory *memory, const Kind *kind, Row *row, int are_gradients) {
    for (int64_t place = 0; row != NULL && place < row->count; place++) {
        int64_t name = are_gradients ? 2 * place + 1 : 2 * kind->kept_inputs.items[place];
        int is_early = 0;
        for (int64_t early = 0; early < kind->early.count; early++)
            is_early |= kind->early.items[early] == name;
        if (is_early && row->items[place] != NONE) {
            drop(&memory->all, row->items[place]);
            row->items[place] = NONE;
        }
    }
}

/* B, or one of its halves: I gives gradients of inputs, W makes those of parameters. */
static int backward(Memory *memory, int64_t i, int64_t j, const Back *back, int gives, int makes) {
    const Kind *kind = kind_at(memory, i, j);
    Task *task = task_at(memory, i, j);
    if (task->table == NULL)
        give_up("a backward pass has no graph");
    if (gives)
        task->gradients = take(memory, task->gradients, memory->skip_gradients, i, memory->partitions[j].awaited);
    name_lent(memory, kind, j, task);
    if (gives)
        hold_passed(memory, back->returning);
    memcpy(memory->table, task->table->items, (size_t)task->table->count * sizeof *memory->table);
    Way way = backward_way(memory, back, &memory->partitions[j], task->how != FORWARD_CHECKPOINT);
    if (run_rows(memory, kind, j, back->rows, way) || (makes && make_gradients(memory, back, j, way))
        || (gives && give_gradients(memory, kind, back, i, j))) {
        return MEMORY_FULL;
    }
    forget_names(memory);
    free_row(memory, &task->table);
    if (!makes) {
        task->table = keep_table(memory, kind->later);
        drop_early(memory, kind, task->gradients, 1);
        drop_early(memory, kind, task->lent, 0);
        return MEMORY_OK;
    }
    drop_row(memory, &task->saved);
    drop_row(memory, &task->lent);
    drop_row(memory, &task->gradients);
    return MEMORY_OK;
}

int memory_backward(Memory *memory, int32_t i, int32_t j, int32_t part) {
    const Kind *kind = kind_at(memory, i, j);
    int has_weights = kind->weight_half.rows.count > 0;
    if (part == BACKWARD_WEIGHTS)
        return has_weights ? backward(memory, i, j, &kind->weight_half, 0, 1) : MEMORY_OK;
    if (part == BACKWARD_INPUTS && kind->splits)
        return backward(memory, i, j, &kind->input_half, 1, !has_weights);
    return backward(memory, i, j, &kind->whole, 1, 1);
}
