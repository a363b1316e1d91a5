/* What the memory keeps of the workload, and what it knows of each task meanwhile. */

#ifndef GPIPE_BENCH_MEMORY_STATE_H
#define GPIPE_BENCH_MEMORY_STATE_H

#include "../../machine/allocator.h"
#include "memory.h"

/* A list in the description. */
typedef struct {
    const int64_t *items;
    int64_t count;
} Numbers;

/* What a row of a pass asks for; description.py has the same codes. A row is two integers: the code, with the slot above
   it, and bytes. */
enum {
    ROW_ALLOC = 0,    /* memory for a slot */
    ROW_DROP = 1,     /* the slot is held no longer */
    ROW_BRIEF = 2,    /* allocate and free at once */
    ROW_SCRATCH = 3,  /* the same, for kernels that can do without; the slot is the kind of kernel */
    ROW_LET_GO = 4,   /* the pass needs something that was lent to it no longer */
    ROW_GRADIENT = 5, /* drop, unless it becomes the gradient of a parameter */
    ROW_VIEW = 6,     /* the same for a view: what it is added to is replaced by a sum of these bytes */
    ROW_LEAVING = 7,  /* drop, unless outputs of a recomputation are kept until the end */
    ROW_KEPT = 8,     /* drop, if they are */
};

/* Bits of a row's code, below the slot. */
#define CODE_BITS 8

/* A backward pass, or a half of it. */
typedef struct {
    Numbers returning; /* name or slot of the gradient of each input and arriving skip; empty: all are -1 */
    Numbers shared;    /* slots among them that the other half needs, too */
    Numbers made;      /* slots that become gradients of parameters that have none */
    Numbers rows;
} Back;

/* A task, as far as it matters to memory: tasks that are alike share one. Blocks of its own have slots. Names below -1
   are those of what comes to it: -2 - 2 * place for inputs, -3 - 2 * place for gradients of outputs; -1 is a tensor
   that is allocated when the pass has ended. */
typedef struct {
    int64_t slots;       /* of a pass, at most */
    int64_t left;        /* slots in use after a pass with graph, numbered from 0; first those that leave */
    int64_t splits;      /* whether the backward pass has halves */
    int64_t later;       /* slots in use after I, numbered from 0 */
    int64_t hands_over;  /* with a schedule: whether the gradient that comes goes amid a backward pass */
    int64_t passes_back; /* whether a gradient that comes goes on as it is */
    Numbers outputs;     /* bytes */
    Numbers inputs;      /* bytes */
    Numbers returns;     /* of each input, whether a gradient goes back */
    Numbers leaving;     /* name or slot of each output and departing skip; empty: all are -1 */
    Numbers kept;        /* of each leaving slot, whether the graph keeps it */
    Numbers kept_inputs; /* places of inputs that the graph keeps */
    Numbers plain;       /* rows of a pass without graph */
    Numbers graph;       /* rows of a pass with graph */
    Numbers early;       /* what I is the last to need of what came, by -2 - name */
    Back whole;          /* I and W at once */
    Back input_half;     /* I */
    Back weight_half;    /* W; without rows where I does all */
} Kind;

/* The loss of micro-batches of one size, or of the whole batch: its rows are allocations, drops, and one that lets go of
   its input. */
typedef struct {
    int64_t slots;
    Numbers rows;
} Loss;

/* Blocks, in order. */
typedef struct Row {
    union {
        int64_t count;
        struct Row *next; /* of a row that is not used */
    };
    int32_t items[];
} Row;

typedef struct {
    int64_t device, stream;
    int64_t gradients;   /* bytes of the gradients of all parameters */
    int64_t ending;      /* how many skips it reads */
    Numbers incoming;    /* skips that a task takes in, those first; others ride through */
    Numbers departing;   /* skips that other partitions take from here */
    Numbers awaited;     /* skips whose gradients come here */
    Numbers resident;    /* bytes of each parameter and buffer */
    Numbers state;       /* bytes of each tensor of the optimizer's state */
    Numbers temporary;   /* bytes of each tensor that an update holds while it lasts */
    Row *own;            /* gradients of its parameters, once they are there */
    int is_alone;        /* whether they are those of one task without checkpoint, to which none were added yet */
} Partition;

/* Micro-batch i on partition j. Rows are NULL where there is nothing. */
typedef struct {
    Row *saved;     /* inputs that the micro-batch, or a checkpoint, holds */
    Row *table;     /* slots that its graph keeps */
    Row *lent;      /* inputs that its graph keeps, as in Kind.kept_inputs */
    Row *gradients; /* of its outputs, as far as they have come; NONE where there is none */
    int32_t how;    /* FORWARD_OPEN, ... */
} Task;

typedef struct {
    int64_t source, target, returns;
    Numbers bytes; /* by the number of the micro-batch's size */
} Skip;

/* What holds for a whole run. */
typedef struct {
    int64_t published;  /* gradients are set to zero between steps, and checkpoints keep what they recomputed */
    int64_t scheduled;  /* a schedule runs all passes */
    int64_t riding;     /* skips ride through the partitions between */
    int64_t is_static;  /* parameters are known tensor by tensor */
    int64_t devices, capacity;
    int64_t names;      /* that a task may have for what comes to it */
    int64_t kernels;    /* kinds of kernels that ask for scratch memory */
    int64_t size_count; /* of micro-batches */
    Numbers device_of;  /* by stream */
    Numbers sizes;      /* of each micro-batch, the number of its size */
    Numbers batch;      /* bytes of each tensor of the batch */
    Numbers kind_of;    /* by partition and size */
} Given;

/* What the newest copy of a thread has sent. */
typedef VECTOR(int32_t) Sent;

struct Memory {
    Holder holder;
    Given given;
    Allocators all;
    int64_t partition_count, microbatch_count, skip_count;
    Kind *kinds;
    Loss *losses;       /* by the number of the micro-batch's size, then that of the batch */
    Partition *partitions;
    Skip *skips;
    Task *tasks;        /* see task_at */
    Row **values;       /* of each micro-batch, wherever it is */
    int32_t *passing;   /* of each micro-batch and skip, a skip on its way, or NONE */
    int32_t *skip_gradients;
    Row *held_batch;    /* the caller holds the batch all the time */
    VECTOR(Row *) unused;         /* rows, by how many blocks they have room for */
    VECTOR(char *) chunks;        /* where rows lie, each chunk larger than the one before */
    size_t room;                  /* of the newest chunk, from its beginning */
    VECTOR(Sent) sent;            /* by thread */
    int has_state;      /* whether there is an optimizer's state */
    char *without;      /* kinds of kernels that do without scratch memory from now on */
    int32_t *table;     /* slots of the pass that runs */
    int32_t *lent;      /* by -2 - name: what is lent to it, or NONE */
};

/* How rows are run. */
typedef struct {
    int is_open;  /* its graph was made by the forward pass, so that what is lent may go amid it */
    int is_made;  /* gradients become those of parameters */
    int is_summed;
    int keeps;    /* outputs of the recomputation stay until the end */
} Way;

/* Run the rows of a pass on the table of slots; MEMORY_FULL if the device is full. */
int run_rows(Memory *memory, const Kind *kind, int64_t j, Numbers rows, Way way);

/* How a backward pass is run. Where there is no checkpoint, autograd sums up gradients of several micro-batches before
   any becomes a parameter's; those that are kept from step to step were summed up by older rules. */
Way backward_way(const Memory *memory, const Back *back, const Partition *partition, int is_open);

/* A step's first backward pass of a partition makes the gradients of its parameters. */
int make_gradients(Memory *memory, const Back *back, int64_t j, Way way);

/* A row for some blocks, whose items are yet to be set. */
Row *new_row(Memory *memory, int64_t count);

/* Forget a row, if there is one. */
void free_row(Memory *memory, Row **row);

/* Drop the blocks of a row, and forget it. */
void drop_row(Memory *memory, Row **row);

static inline const Kind *kind_at(const Memory *memory, int64_t i, int64_t j) {
    return &memory->kinds[memory->given.kind_of.items[j * memory->given.size_count + memory->given.sizes.items[i]]];
}

/* Tasks of one clock-cycle are neighbours, so that a large pipeline finds them in the cache. */
static inline Task *task_at(const Memory *memory, int64_t i, int64_t j) {
    int64_t cycle = (uint32_t)(i + j) % (uint32_t)memory->microbatch_count;
    return &memory->tasks[cycle * memory->partition_count + j];
}

static inline int32_t *skip_at(const Memory *memory, int32_t *table, int64_t i, int64_t skip) {
    return &table[i * memory->skip_count + skip];
}

static inline int64_t skip_bytes(const Memory *memory, int64_t i, int64_t skip) {
    return memory->skips[skip].bytes.items[memory->given.sizes.items[i]];
}

/* A block of partition j on its compute stream. */
static inline int32_t new_on(Memory *memory, int64_t j, int64_t bytes) {
    return allocate(&memory->all, (int32_t)memory->partitions[j].stream, bytes);
}

#endif
