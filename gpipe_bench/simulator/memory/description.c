/* Reads the description that description.py writes: records of integers, then lists, each with its length before it, in
   the order of the structs in state.h. */

#include "state.h"

/* A place in the description; past its end there are zeros. */
typedef struct {
    const int64_t *next, *end;
    int is_short;
} Reader;

static int64_t number(Reader *reader) {
    if (reader->next < reader->end)
        return *reader->next++;
    reader->is_short = 1;
    return 0;
}

static int64_t counted(Reader *reader) {
    int64_t count = number(reader);
    if (count >= 0 && count <= reader->end - reader->next)
        return count;
    reader->is_short = 1;
    return 0;
}

/* Reads the first members of a struct: so many integers, then so many lists. */
static void read_record(Reader *reader, void *record, int integers, int lists) {
    int64_t *integer = record;
    for (int place = 0; place < integers; place++)
        *integer++ = number(reader);
    for (Numbers *list = (Numbers *)integer; lists > 0; lists--, list++) {
        list->count = counted(reader);
        list->items = reader->next;
        reader->next += list->count;
    }
}

/* Reads as many structs as follow. */
static void *read_records(Reader *reader, int64_t *count, size_t size, int integers, int lists) {
    *count = counted(reader);
    char *made = zeros(*count, size);
    for (int64_t place = 0; place < *count; place++)
        read_record(reader, made + (size_t)place * size, integers, lists);
    return made;
}

Memory *memory_new(const int64_t *description, int64_t length) {
    Reader reader = {description, description + length, 0};
    Memory *memory = zeros(1, sizeof(Memory));
    int64_t kinds, losses, slots = 0;
    read_record(&reader, &memory->given, 9, 4);
    memory->skips = read_records(&reader, &memory->skip_count, sizeof(Skip), 3, 1);
    memory->partitions = read_records(&reader, &memory->partition_count, sizeof(Partition), 4, 6);
    memory->kinds = read_records(&reader, &kinds, sizeof(Kind), 6, 21);
    memory->losses = read_records(&reader, &losses, sizeof(Loss), 1, 1);
    const Given *given = &memory->given;
    int64_t m = memory->microbatch_count = given->sizes.count;
    if (reader.is_short || reader.next != reader.end) {
        memory_free(memory);
        return NULL;
    }
    for (int64_t kind = 0; kind < kinds; kind++)
        slots = memory->kinds[kind].slots > slots ? memory->kinds[kind].slots : slots;
    for (int64_t loss = 0; loss < losses; loss++)
        slots = memory->losses[loss].slots > slots ? memory->losses[loss].slots : slots;
    int32_t devices = (int32_t)given->devices, streams = (int32_t)given->device_of.count;
    allocators_begin(&memory->all, devices, given->device_of.items, streams, given->capacity);
    memory->tasks = zeros(m * memory->partition_count, sizeof(Task));
    memory->values = zeros(m, sizeof(Row *));
    memory->passing = zeros(m * memory->skip_count, sizeof(int32_t));
    memory->skip_gradients = zeros(m * memory->skip_count, sizeof(int32_t));
    memory->without = zeros(given->kernels, 1);
    memory->table = zeros(slots, sizeof(int32_t));
    memory->lent = zeros(given->names, sizeof(int32_t));
    return memory;
}

void memory_free(Memory *memory) {
    for (uint32_t chunk = 0; chunk < memory->chunks.count; chunk++)
        free(memory->chunks.items[chunk]);
    for (uint32_t thread = 0; thread < memory->sent.count; thread++)
        free(memory->sent.items[thread].items);
    void *parts[] = {
        memory->kinds, memory->losses, memory->partitions, memory->skips, memory->tasks, memory->values, memory->passing,
        memory->skip_gradients, memory->sent.items, memory->without, memory->table, memory->lent, memory->unused.items,
        memory->chunks.items,
    };
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
        free(parts[part]);
    allocators_end(&memory->all);
    free(memory);
}
