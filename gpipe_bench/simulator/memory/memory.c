/* What stays between tasks: parameters, the batch, copies on their way, the loss. */

#include "state.h"

/* --- rows --------------------------------------------------------------------------------------------------------- */

Row *new_row(Memory *memory, int64_t count) {
    while (memory->unused.count <= count)
        PUSH(memory->unused, NULL);
    Row *row = memory->unused.items[count];
    if (row != NULL) {
        memory->unused.items[count] = row->next;
    } else {
        size_t size = (sizeof(Row) + (size_t)count * sizeof(int32_t) + 7) / 8 * 8;
        if (memory->room < size) {
            memory->room = size + ((size_t)1 << 16 << memory->chunks.count);
            PUSH(memory->chunks, zeros(1, memory->room));
        }
        memory->room -= size;
        row = (Row *)(memory->chunks.items[memory->chunks.count - 1] + memory->room);
    }
    row->count = count;
    return row;
}

void free_row(Memory *memory, Row **row) {
    if (*row == NULL)
        return;
    Row **unused = &memory->unused.items[(*row)->count];
    (*row)->next = *unused;
    *unused = *row;
    *row = NULL;
}

void drop_row(Memory *memory, Row **row) {
    for (int64_t place = 0; *row != NULL && place < (*row)->count; place++)
        if ((*row)->items[place] != NONE)
            drop(&memory->all, (*row)->items[place]);
    free_row(memory, row);
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

/* Parameters and buffers come to their devices at once, on the default streams. */
static int settle(Memory *memory) {
    for (int64_t j = 0; j < memory->partition_count; j++) {
        const Partition *partition = &memory->partitions[j];
        for (int64_t place = 0; place < partition->resident.count; place++)
            if (allocate(&memory->all, (int32_t)partition->device, partition->resident.items[place]) == NONE)
                return MEMORY_FULL;
    }
    return MEMORY_OK;
}

/* A batch comes in, of which micro-batches are views. What is known of tasks is forgotten; what their blocks still take
   is in use for ever. */
static void begin_batch(Memory *memory) {
    int64_t tasks = memory->microbatch_count * memory->partition_count;
    for (Task *task = memory->tasks; task < memory->tasks + tasks; task++) {
        free_row(memory, &task->saved);
        free_row(memory, &task->table);
        free_row(memory, &task->lent);
        free_row(memory, &task->gradients);
    }
    for (int64_t i = 0; i < memory->microbatch_count; i++) {
        free_row(memory, &memory->values[i]);
        Row *values = memory->values[i] = new_row(memory, memory->given.batch.count);
        for (int64_t place = 0; place < values->count; place++)
            values->items[place] = hold(&memory->all, memory->held_batch->items[place]);
    }
    for (int64_t place = 0; place < memory->microbatch_count * memory->skip_count; place++)
        memory->passing[place] = memory->skip_gradients[place] = NONE;
}

int memory_start(Memory *memory) {
    for (int64_t name = 0; name < memory->given.names; name++)
        memory->lent[name] = NONE;
    if (settle(memory))
        return MEMORY_FULL;
    Row *batch = memory->held_batch = new_row(memory, memory->given.batch.count);
    for (int64_t place = 0; place < batch->count; place++) {
        batch->items[place] = new_on(memory, 0, memory->given.batch.items[place]);
        if (batch->items[place] == NONE)
            return MEMORY_FULL;
    }
    return MEMORY_OK;
}

void memory_begin_step(Memory *memory) {
    for (int64_t j = 0; j < memory->partition_count && !memory->given.published; j++) {
        drop_row(memory, &memory->partitions[j].own);
        memory->partitions[j].is_alone = 0;
    }
    begin_batch(memory);
}

int memory_update(Memory *memory) {
    for (int64_t j = 0; j < memory->partition_count && memory->given.is_static; j++) {
        const Partition *partition = &memory->partitions[j];
        for (int64_t place = 0; place < partition->state.count && !memory->has_state; place++)
            if (new_on(memory, j, partition->state.items[place]) == NONE)
                return MEMORY_FULL;
        Row *held = new_row(memory, partition->temporary.count);
        for (int64_t place = 0; place < held->count; place++)
            held->items[place] = NONE;
        for (int64_t place = 0; place < held->count; place++) {
            held->items[place] = new_on(memory, j, partition->temporary.items[place]);
            if (held->items[place] == NONE) {
                drop_row(memory, &held);
                return MEMORY_FULL;
            }
        }
        drop_row(memory, &held);
    }
    memory->has_state = 1;
    return MEMORY_OK;
}

/* --- gradients of parameters -------------------------------------------------------------------------------------- */

Way backward_way(const Memory *memory, const Back *back, const Partition *partition, int is_open) {
    Way way = {.is_open = is_open, .keeps = memory->given.published && !is_open};
    way.is_made = partition->own == NULL && memory->given.is_static && back->made.count;
    way.is_summed = is_open && partition->is_alone && !memory->given.scheduled && !memory->given.published;
    return way;
}

int make_gradients(Memory *memory, const Back *back, int64_t j, Way way) {
    Partition *partition = &memory->partitions[j];
    if (partition->own != NULL) {
        partition->is_alone = 0;
        return MEMORY_OK;
    }
    int64_t made = way.is_made ? back->made.count : 0, missing = memory->given.is_static ? partition->gradients : 0;
    for (int64_t place = 0; place < made; place++)
        missing -= requested(&memory->all, memory->table[back->made.items[place]]);
    Row *own = partition->own = new_row(memory, made + (missing > 0));
    for (int64_t place = 0; place < made; place++)
        own->items[place] = memory->table[back->made.items[place]];
    if (missing > 0) {
        /* Gradients that were no blocks of the backward pass, such as copies of views. */
        own->items[made] = new_on(memory, j, missing);
        if (own->items[made] == NONE)
            return MEMORY_FULL;
    }
    partition->is_alone = way.is_open;
    return MEMORY_OK;
}

/* --- loss --------------------------------------------------------------------------------------------------------- */

/* What the batch has come to: bytes of all outputs. */
static int64_t output_bytes(const Memory *memory) {
    int64_t bytes = 0;
    for (int64_t i = 0; i < memory->microbatch_count; i++)
        for (int64_t place = 0; place < memory->values[i]->count; place++)
            bytes += requested(&memory->all, memory->values[i]->items[place]);
    return bytes;
}

/* Make the requests of a loss. It drops `input`, and leaves the gradients of what is in it in the first slots. Where no
   bytes are given, a gradient has those of its output, or `whole`. */
static int run_loss(Memory *memory, const Loss *loss, Row *input, int64_t whole) {
    for (int64_t place = 0; place < loss->rows.count; place += 2) {
        int64_t slot = loss->rows.items[place] >> CODE_BITS, bytes = loss->rows.items[place + 1];
        if (bytes < 0)
            bytes = whole ? whole : requested(&memory->all, input->items[slot]);
        switch (loss->rows.items[place] & ((1 << CODE_BITS) - 1)) {
        case ROW_ALLOC:
            memory->table[slot] = new_on(memory, memory->partition_count - 1, bytes);
            if (memory->table[slot] == NONE)
                return MEMORY_FULL;
            break;
        case ROW_DROP:
            drop(&memory->all, memory->table[slot]);
            break;
        case ROW_LET_GO:
            drop_row(memory, &input);
            break;
        }
    }
    return MEMORY_OK;
}

/* The outputs are concatenated, and every micro-batch gets its share of the gradient. */
int memory_loss(Memory *memory) {
    int64_t m = memory->microbatch_count, last = memory->partition_count - 1, bytes = output_bytes(memory);
    /* A single micro-batch is the output as it is. */
    int32_t together = m > 1 ? new_on(memory, last, bytes) : NONE;
    if (m > 1 && together == NONE)
        return MEMORY_FULL;
    if (m > 1)
        for (int64_t i = 0; i < m; i++)
            drop_row(memory, &memory->values[i]);
    Row *input = m > 1 ? new_row(memory, 1) : memory->values[0];
    if (m > 1)
        input->items[0] = together;
    memory->values[0] = NULL;
    if (run_loss(memory, &memory->losses[memory->given.size_count], input, bytes))
        return MEMORY_FULL;
    int32_t gradient = memory->table[0];
    memory->all.blocks.items[gradient].holders = (int32_t)m;
    for (int64_t i = 0; i < m; i++) {
        Row *row = new_row(memory, 1);
        row->items[0] = gradient;
        free_row(memory, &task_at(memory, i, last)->gradients);
        task_at(memory, i, last)->gradients = row;
    }
    return MEMORY_OK;
}

int memory_microbatch_loss(Memory *memory, int32_t i) {
    Row *outputs = memory->values[i], *row = new_row(memory, outputs->count);
    Task *last = task_at(memory, i, memory->partition_count - 1);
    free_row(memory, &last->gradients);
    last->gradients = row;
    memory->values[i] = NULL;
    if (run_loss(memory, &memory->losses[memory->given.sizes.items[i]], outputs, 0))
        return MEMORY_FULL;
    for (int64_t place = 0; place < row->count; place++)
        row->items[place] = memory->table[place];
    return MEMORY_OK;
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

/* Copy one tensor: make it anew, for the compute stream of its receiver, and put it where the old one was. */
static int copy_tensor(Memory *memory, const MemoryTransfer *copy, int32_t *place, int64_t bytes) {
    const Partition *receiver = &memory->partitions[copy->back ? copy->source : copy->target];
    int32_t made = allocate(&memory->all, copy->receiving, bytes);
    if (made == NONE)
        return MEMORY_FULL;
    use_on_stream(&memory->all, made, (int32_t)receiver->stream);
    PUSH(memory->sent.items[copy->thread], *place);
    *place = made;
    return MEMORY_OK;
}

static int copy_skip(Memory *memory, const MemoryTransfer *copy, int64_t skip) {
    const Skip *one = &memory->skips[skip];
    if (copy->back && !one->returns)
        return MEMORY_OK;
    int32_t *table = copy->back ? memory->skip_gradients : memory->passing;
    return copy_tensor(memory, copy, skip_at(memory, table, copy->i, skip), skip_bytes(memory, copy->i, skip));
}

/* Copy a micro-batch or its gradients, with the skips that ride in it. */
static int copy_microbatch(Memory *memory, const MemoryTransfer *copy) {
    const Kind *kind = kind_at(memory, copy->i, copy->target);
    Row *row = copy->back ? task_at(memory, copy->i, copy->source)->gradients : memory->values[copy->i];
    for (int64_t place = 0; place < kind->inputs.count; place++) {
        if (copy->back && !kind->returns.items[place])
            continue;
        if (copy_tensor(memory, copy, &row->items[place], kind->inputs.items[place]))
            return MEMORY_FULL;
    }
    for (int64_t skip = 0; skip < memory->skip_count && memory->given.riding; skip++) {
        int rides = memory->skips[skip].source < copy->target && copy->target <= memory->skips[skip].target;
        if (rides && copy_skip(memory, copy, skip))
            return MEMORY_FULL;
    }
    return MEMORY_OK;
}

int memory_transfer(Memory *memory, const MemoryTransfer *copy) {
    const Partition *sender = &memory->partitions[copy->back ? copy->target : copy->source];
    while (memory->sent.count <= copy->thread)
        PUSH(memory->sent, (Sent){NULL, 0, 0});
    if (copy->skip == NONE ? copy_microbatch(memory, copy) : copy_skip(memory, copy, copy->skip))
        return MEMORY_FULL;
    const Sent *sent = &memory->sent.items[copy->thread];
    for (int64_t place = 0; place < sent->count && copy->sending != sender->stream; place++)
        use_on_stream(&memory->all, sent->items[place], copy->sending);
    return MEMORY_OK;
}

void memory_transferred(Memory *memory, uint32_t thread) {
    Sent *sent = &memory->sent.items[thread];
    for (int64_t place = 0; place < sent->count; place++)
        drop(&memory->all, sent->items[place]);
    sent->count = 0;
}

/* --- results ------------------------------------------------------------------------------------------------------ */

void memory_use(const Memory *memory, int32_t device, MemoryUse *use) {
    *use = memory->all.devices[device].use;
}

void memory_shortage(const Memory *memory, MemoryShortage *shortage) {
    *shortage = memory->all.shortage;
}

/* --- what the clock tells ----------------------------------------------------------------------------------------- */

static bool starts(void *own, MemoryRecord *record, void *context) {
    Memory *memory = own;
    memory->all.record = record;
    memory->all.context = context;
    return memory_start(memory) == MEMORY_OK;
}

static int tell_copy(Memory *memory, const TracedTask *task, int32_t sending, int32_t receiving, uint32_t thread) {
    bool back = task->kind == TASK_copy_grad || task->kind == TASK_portal_grad;
    MemoryTransfer made = {task->i, task->source, task->j, task->skip, back, sending, receiving, thread};
    return memory_transfer(memory, &made);
}

static bool tell(void *own, const TracedTask *task, int32_t sending, int32_t receiving, uint32_t thread) {
    Memory *memory = own;
    switch (task->kind) {
    case TASK_forward: return memory_forward(memory, task->i, task->j, task->how) == MEMORY_OK;
    case TASK_recompute: return memory_recompute(memory, task->i, task->j) == MEMORY_OK;
    case TASK_backward:
    case TASK_backward_inputs:
    case TASK_backward_weights:
        return memory_backward(memory, task->i, task->j, task->kind - TASK_backward) == MEMORY_OK;
    case TASK_collect: memory_collected(memory, task->i, task->j); return true;
    case TASK_loss: return memory_loss(memory) == MEMORY_OK;
    case TASK_microbatch_loss: return memory_microbatch_loss(memory, task->i) == MEMORY_OK;
    case TASK_update: return memory_update(memory) == MEMORY_OK;
    case TASK_begin: memory_begin_step(memory); return true;
    default: return tell_copy(memory, task, sending, receiving, thread) == MEMORY_OK;
    }
}

static void is_issued(void *own, const TracedTask *task, uint32_t thread) {
    if (task->kind >= TASK_copy && task->kind <= TASK_portal_grad)
        memory_transferred(own, thread);
}

static bool flushed(void *own, int32_t number) {
    Device *device = &((Memory *)own)->all.devices[number];
    int64_t before = device->flushes_seen;
    device->flushes_seen = device->use.flushes;
    return device->use.flushes > before;
}

const Holder *memory_holder(Memory *memory) {
    memory->holder = (Holder){memory, &memory->all, starts, tell, is_issued, flushed};
    return &memory->holder;
}
