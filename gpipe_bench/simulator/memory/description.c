/* Reads the description that description.py writes: integers in the order of the calls here. A list has its length
   before it. */

#include "state.h"

enum { VERSION = 1 };

/* A place in the description; past its end there are zeros. */
typedef struct {
    const int64_t *next, *end;
    int is_short;
} Reader;

static int64_t number(Reader *reader) {
    if (reader->next >= reader->end) {
        reader->is_short = 1;
        return 0;
    }
    return *reader->next++;
}

/* How many of something follow. */
static int64_t counted(Reader *reader) {
    int64_t count = number(reader);
    if (count < 0 || count > reader->end - reader->next) {
        reader->is_short = 1;
        return 0;
    }
    return count;
}

static Numbers numbers(Reader *reader) {
    int64_t count = counted(reader);
    Numbers found = {reader->next, count};
    reader->next += count;
    return found;
}

static void read_skips(Memory *memory, Reader *reader) {
    memory->skip_count = counted(reader);
    memory->skips = zeros(memory->skip_count, sizeof(Skip));
    for (Skip *skip = memory->skips; skip < memory->skips + memory->skip_count; skip++) {
        skip->source = number(reader);
        skip->target = number(reader);
        skip->returns = number(reader);
        skip->bytes = numbers(reader);
    }
}

static void read_partitions(Memory *memory, Reader *reader) {
    memory->partition_count = counted(reader);
    memory->partitions = zeros(memory->partition_count, sizeof(Partition));
    for (Partition *one = memory->partitions; one < memory->partitions + memory->partition_count; one++) {
        one->device = number(reader);
        one->stream = number(reader);
        one->gradients = number(reader);
        one->temporary = number(reader);
        one->ending = number(reader);
        one->incoming = numbers(reader);
        one->departing = numbers(reader);
        one->resident = numbers(reader);
        one->state = numbers(reader);
    }
}

static void read_back(Back *back, Reader *reader) {
    back->returning = numbers(reader);
    back->shared = numbers(reader);
    back->made = numbers(reader);
    back->rows = numbers(reader);
}

/* Reads the kinds of tasks; gives the most slots that a pass has. */
static int64_t read_kinds(Memory *memory, Reader *reader) {
    int64_t count = counted(reader), slots = 0;
    memory->kinds = zeros(count, sizeof(Kind));
    for (Kind *kind = memory->kinds; kind < memory->kinds + count; kind++) {
        int64_t own = number(reader);
        slots = own > slots ? own : slots;
        kind->left = number(reader);
        kind->splits = number(reader);
        kind->later = number(reader);
        kind->hand_over = number(reader);
        kind->passes_back = number(reader);
        Numbers *lists[] = {
            &kind->outputs, &kind->inputs, &kind->returns, &kind->leaving, &kind->kept, &kind->kept_inputs,
            &kind->plain, &kind->graph, &kind->early,
        };
        for (size_t list = 0; list < sizeof lists / sizeof *lists; list++)
            *lists[list] = numbers(reader);
        read_back(&kind->whole, reader);
        read_back(&kind->input_half, reader);
        read_back(&kind->weight_half, reader);
    }
    return slots;
}

Memory *memory_new(const int64_t *description, int64_t length) {
    Reader reader = {description, description + length, 0};
    if (number(&reader) != VERSION)
        return NULL;
    Memory *memory = zeros(1, sizeof(Memory));
    memory->published = number(&reader);
    memory->scheduled = number(&reader);
    memory->riding = number(&reader);
    memory->is_static = number(&reader);
    int64_t devices = number(&reader), capacity = number(&reader);
    Numbers device_of = numbers(&reader);
    memory->name_count = number(&reader);
    int64_t kernels = number(&reader);
    memory->size_count = number(&reader);
    memory->sizes = numbers(&reader);
    memory->batch = numbers(&reader);
    memory->kind_of = numbers(&reader);
    read_skips(memory, &reader);
    read_partitions(memory, &reader);
    int64_t slots = read_kinds(memory, &reader), m = memory->sizes.count;
    if (reader.is_short || reader.next != reader.end) {
        memory_free(memory);
        return NULL;
    }
    allocators_begin(&memory->all, (int32_t)devices, device_of.items, (int32_t)device_of.count, capacity);
    memory->microbatch_count = m;
    memory->tasks = zeros(m * memory->partition_count, sizeof(Task));
    memory->values = zeros(m, sizeof(Row *));
    memory->passing = zeros(m * memory->skip_count, sizeof(int32_t));
    memory->skip_gradients = zeros(m * memory->skip_count, sizeof(int32_t));
    memory->without = zeros(kernels, 1);
    memory->table = zeros(slots, sizeof(int32_t));
    memory->lent = zeros(memory->name_count, sizeof(int32_t));
    return memory;
}

void forget_rows(Memory *memory) {
    int64_t tasks = memory->microbatch_count * memory->partition_count;
    for (Task *task = memory->tasks; task < memory->tasks + tasks; task++) {
        free_row(&task->saved);
        free_row(&task->table);
        free_row(&task->lent);
        free_row(&task->gradients);
    }
    for (int64_t i = 0; i < memory->microbatch_count; i++)
        free_row(&memory->values[i]);
}

void memory_free(Memory *memory) {
    forget_rows(memory);
    for (int64_t j = 0; j < memory->partition_count; j++)
        free_row(&memory->partitions[j].own);
    free_row(&memory->held_batch);
    void *parts[] = {
        memory->kinds, memory->partitions, memory->skips, memory->tasks, memory->values, memory->passing,
        memory->skip_gradients, memory->sent.items, memory->without, memory->table, memory->lent,
    };
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
        free(parts[part]);
    allocators_end(&memory->all);
    free(memory);
}
