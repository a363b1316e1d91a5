/* The memory of all devices during one or more steps: who holds which tensors of the tasks of a pipeline.

   It holds the memory of tasks that a trace names: machine/memory.h says how the clock tells it of them.

   Numbers: i micro-batch, j partition, k skip (its place in Workload.skips); devices and streams as in Places: stream d
   below the number of devices is the default stream of device d. All are int32_t; bytes are int64_t. */

#ifndef GPIPE_BENCH_MEMORY_H
#define GPIPE_BENCH_MEMORY_H

#include <stdint.h>

#include "../../machine/memory.h"

typedef struct Memory Memory;

/* What functions that make requests return. After MEMORY_FULL the run is over: read memory_shortage, and free all. */
enum { MEMORY_OK = 0, MEMORY_FULL = 1 };

/* Kinds of tasks, as description.py names them. */
enum {
    TASK_forward,
    TASK_recompute, /* action R: fill a checkpoint or cell */
    TASK_backward,  /* actions B, I and W: where a task is not split, I is B */
    TASK_backward_inputs,
    TASK_backward_weights,
    TASK_copy,
    TASK_copy_grad,
    TASK_portal,
    TASK_portal_grad,
    TASK_collect,   /* the calling thread takes what a forward pass gave */
    TASK_loss,      /* of the whole batch, with its gradient */
    TASK_microbatch_loss,
    TASK_update,
    TASK_begin      /* a step begins */
};

/* --- life --------------------------------------------------------------------------------------------------------- */

/* Make the memory from its description: integers that description.py writes, and that stay where they are until
   memory_free. NULL: the description is longer or shorter than it says. */
Memory *memory_new(const int64_t *description, int64_t length);

/* What the clock tells of tasks; it lives as long as the memory. */
const Holder *memory_holder(Memory *memory);

/* Parameters and buffers come to their devices, and the batch that the caller holds. */
int memory_start(Memory *memory);

void memory_free(Memory *memory);

/* --- what host threads issue -------------------------------------------------------------------------------------- */

/* How a forward pass is run, and what is kept until its backward pass. */
enum {
    FORWARD_OPEN = 0,       /* with a graph, of many nodes */
    FORWARD_TIED = 1,       /* with a graph, and one node around it that keeps gradients */
    FORWARD_CHECKPOINT = 2, /* without a graph; its inputs and gradients are kept until the backward pass is over */
    FORWARD_CELL = 3,       /* without a graph; its recomputation takes its inputs, of which the graph keeps some */
};
int memory_forward(Memory *memory, int32_t i, int32_t j, int32_t kind);

int memory_recompute(Memory *memory, int32_t i, int32_t j);

/* The calling thread takes what a forward pass gave; of an open graph, the micro-batch holds the inputs no longer. */
void memory_collected(Memory *memory, int32_t i, int32_t j);

/* Actions B, I and W: the whole backward pass, the gradients of inputs, then those of weights. Where a task is not split,
   I is B. */
enum { BACKWARD_WHOLE, BACKWARD_INPUTS, BACKWARD_WEIGHTS };
int memory_backward(Memory *memory, int32_t i, int32_t j, int32_t part);

/* A copy is about to be issued by a host thread; once it was, what the thread has sent is held by the micro-batch no
   longer. */
typedef struct {
    int32_t i;
    int32_t source, target; /* partitions, as the forward pass has them */
    int32_t skip;           /* the skip that is copied alone, or -1 */
    int32_t back;           /* whether gradients are copied, from target to source */
    int32_t sending, receiving; /* streams */
    uint32_t thread;
} MemoryTransfer;
int memory_transfer(Memory *memory, const MemoryTransfer *transfer);
void memory_transferred(Memory *memory, uint32_t thread);

/* The loss of the whole batch, with its gradient; or that of one micro-batch, whose outputs are held until its gradient
   is made. */
int memory_loss(Memory *memory);
int memory_microbatch_loss(Memory *memory, int32_t i);

int memory_update(Memory *memory);
void memory_begin_step(Memory *memory);

/* --- results ------------------------------------------------------------------------------------------------------ */

void memory_use(const Memory *memory, int32_t device, MemoryUse *use);

/* After MEMORY_FULL. */
void memory_shortage(const Memory *memory, MemoryShortage *shortage);

#endif
