/* The memory of all devices during one or more steps, as the clock sees it.

   The clock calls a function when a host thread issues something, in the order of issue, before the operation itself
   goes to its stream. The memory asks one thing of the clock: to be told when all that is pending on a stream has run.

       clock --> memory   memory_forward, ..., memory_flushed
       memory --> clock   record(context, stream, event)
       clock --> memory   event_passed(allocators, event)

   Numbers: i micro-batch, j partition, k skip (its place in Workload.skips); devices and streams as in Places: stream d
   below the number of devices is the default stream of device d. All are int32_t; bytes are int64_t. */

#ifndef GPIPE_BENCH_MEMORY_H
#define GPIPE_BENCH_MEMORY_H

#include <stdint.h>

typedef struct Memory Memory;
typedef struct Allocators Allocators;

/* What functions that make requests return. After MEMORY_FULL the run is over: read memory_shortage, and free all. */
enum { MEMORY_OK = 0, MEMORY_FULL = 1 };

/* The clock calls event_passed(allocators, event) as soon as any operation ends that is pending on `stream` now, after
   record has returned how many there are. Once a run is over it need not. */
typedef int32_t MemoryRecord(void *context, int32_t stream, int32_t event);

/* --- life --------------------------------------------------------------------------------------------------------- */

/* Make the memory from its description: integers that description.py writes, and that stay where they are until
   memory_free. NULL: the description is longer or shorter than it says. */
Memory *memory_new(const int64_t *description, int64_t length);

/* Who is asked to record events. Before memory_start. */
void memory_connect(Memory *memory, MemoryRecord *record, void *context);

/* Parameters, buffers and the batch come to their devices. */
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

/* Action R: fill a checkpoint or cell. */
int memory_recompute(Memory *memory, int32_t i, int32_t j);

/* The calling thread takes what a forward pass gave; of an open graph, the micro-batch holds the inputs no longer. */
void memory_collected(Memory *memory, int32_t i, int32_t j);

/* Actions B, I and W: the whole backward pass, the gradients of inputs, then those of weights. Where a task is not split,
   I is B. */
enum { BACKWARD_WHOLE, BACKWARD_INPUTS, BACKWARD_WEIGHTS };
int memory_backward(Memory *memory, int32_t i, int32_t j, int32_t part);

/* A copy is about to be issued; once it was, what the last copy has sent is held by the micro-batch no longer. */
typedef struct {
    int32_t i;
    int32_t source, target; /* partitions, as the forward pass has them */
    int32_t skip;           /* the skip that is copied alone, or -1 */
    int32_t back;           /* whether gradients are copied, from target to source */
    int32_t sending, receiving; /* streams */
} MemoryTransfer;
int memory_transfer(Memory *memory, const MemoryTransfer *transfer);
void memory_transferred(Memory *memory);

/* The loss of the whole batch, with its gradient; or that of one micro-batch, whose outputs are held until its gradient
   is made. */
int memory_loss(Memory *memory);
int memory_microbatch_loss(Memory *memory, int32_t i);

int memory_update(Memory *memory);
void memory_next_step(Memory *memory);

/* Whether the allocator of a device gave segments back since this was last asked: then the host waits until the device
   is idle before it issues what it asked for. */
int memory_flushed(Memory *memory, int32_t device);

/* --- what streams have done --------------------------------------------------------------------------------------- */

/* One of the operations before an event of the memory's allocators has ended. */
void event_passed(Allocators *all, int32_t event);
Allocators *memory_allocators(Memory *memory);

/* --- results ------------------------------------------------------------------------------------------------------ */

/* Bytes of a device: asked for and not given back; handed out for them; of segments; and the most of each so far. */
typedef struct {
    int64_t live, allocated, reserved;
    int64_t peak_live, peak_allocated, peak_reserved;
    int64_t flushes; /* how often segments were given back for want of memory */
} MemoryUse;
void memory_use(const Memory *memory, int32_t device, MemoryUse *use);

/* After MEMORY_FULL: the arguments of OutOfMemory. */
typedef struct {
    int64_t device, needed, reserved, capacity;
} MemoryShortage;
void memory_shortage(const Memory *memory, MemoryShortage *shortage);

#endif
