/* What the clock and the memory of devices know of each other.

   Blocks of a trace come and go by its rows (blocks.c). A trace that says of its tasks only what they are is held by a
   Holder: the clock tells it what a host thread is about to issue, in the order of issue, before the operation itself
   goes to its stream. Both have allocators, which ask one thing of the clock: to be told when all that is pending on a
   stream has run.

       clock --> holder       tell, issued
       allocators --> clock   record(context, stream, event)
       clock --> allocators   event_passed(allocators, event)

   Numbers are int32_t, bytes int64_t; stream d below the number of devices is the default stream of device d. */

#ifndef GPIPE_BENCH_MACHINE_MEMORY_H
#define GPIPE_BENCH_MACHINE_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

typedef struct Allocators Allocators;

/* The clock calls event_passed(allocators, event) as soon as any operation ends that is pending on `stream` now, after
   record has returned how many there are. Once a run is over it need not. */
typedef int32_t MemoryRecord(void *context, int32_t stream, int32_t event);

/* One of the operations before an event has ended. */
void event_passed(Allocators *all, int32_t event);

/* A task of a trace. */
typedef struct {
    int32_t kind;           /* a number that its Holder knows */
    int32_t i, j;           /* micro-batch and partition, of a copy that where it arrives */
    int32_t skip;           /* the skip that is copied alone, or -1 */
    int32_t source;         /* of a copy in a forward pass: the partition that sends */
    int32_t how;            /* how a forward pass is run */
} TracedTask;

/* Who holds memory of tasks, and what it does. */
typedef struct {
    void *own;
    Allocators *allocators;
    /* Before all else; false if a device is full: then the run is over. */
    bool (*start)(void *own, MemoryRecord *record, void *context);
    /* A thread comes to a task, of a copy with both of its streams; false if a device is full. */
    bool (*tell)(void *own, const TracedTask *task, int32_t sending, int32_t receiving, uint32_t thread);
    /* A thread has issued a task. */
    void (*issued)(void *own, const TracedTask *task, uint32_t thread);
    /* Whether the allocator of a device gave segments back since this was last asked: then the host waits until the
       device is idle before it issues what it asked for. */
    bool (*flushed)(void *own, int32_t device);
} Holder;

/* Bytes of a device: asked for and not given back; handed out for them; of segments; and the most of each so far. */
typedef struct {
    int64_t live, allocated, reserved;
    int64_t peak_live, peak_allocated, peak_reserved;
    int64_t flushes; /* how often segments were given back for want of memory */
} MemoryUse;

/* A request that a full device could not give: the arguments of OutOfMemory. */
typedef struct {
    int64_t device, needed, reserved, capacity;
} MemoryShortage;

#endif
