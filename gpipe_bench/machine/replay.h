/* The replay of a trace in virtual time.

       replay.c    the life of a replay, and its results
       threads.c   host threads go through their rows: they issue, wait, allocate and free
       order.c     which rows of other threads come before a row
       blocks.c    the blocks of the trace in the caching allocators of the devices
            |
       host.c: what launches cost the host      streams.c, engines.c, agenda.c      allocator.c, pools.c */

#ifndef GPIPE_BENCH_REPLAY_H
#define GPIPE_BENCH_REPLAY_H

#include <stdbool.h>
#include <stdint.h>

#include "grow.h"
#include "memory.h"
#include "trace_row.h"

/* A trace, and the machine that it runs on. */
typedef struct {
    const TraceRow *rows;
    const TraceAccess *accesses; /* of rows to blocks, see TraceRow */
    const int64_t *duration_ns; /* of each row; negative: none */
    const int32_t *bus, *second_bus; /* of each row, or -1 */
    const int64_t *launch_ends; /* when each launch of some rows has run, after the row's start */
    const int64_t *latencies;   /* of the roots of nested passes, one after the other, again and again */
    int64_t count;              /* of the rows, fewer than 2^31 */
    int64_t latency_count;
    int64_t devices, buses;
    int64_t from_host;          /* the name of copies from the host */
    int64_t launch_ns;
    int64_t lock_permille;      /* as in Costs */
    int64_t queue_depth;
    int64_t capacity;           /* bytes of a device; 0: no limit */
    int64_t task_count;
    const TracedTask *tasks;    /* of rows, from 1 */
} ReplayInput;

/* When each row ran, in nanoseconds; -1 where it did not. */
typedef struct {
    int64_t *begin, *end; /* of kernels and copies; both: of an event when it passed, of a mark when all before had ended */
    int64_t *host;        /* when its thread came to it */
    int64_t *turn;        /* its place, from 1, in the order in which threads came to rows */
} ReplayTimes;

/* When each task was issued, when the first of its rows began and when all had ended, in nanoseconds; -1: nothing of it
   ran on a device. */
typedef struct {
    int64_t *issue, *start, *end;
    int64_t *turn; /* that of the first row that ran */
} TaskTimes;

/* --- order.c ------------------------------------------------------------------------------------------------------ */

#define NO_ROW UINT32_MAX

/* Rows that a thread goes through in their order: a node of autograd, or what it does apart from nodes. A thread chooses
   among those of its strands whose first row waits for nothing, as autograd does: by depth, then by rank. */
typedef struct {
    uint32_t thread, first, last; /* rows */
    uint32_t nest;                /* of a root, and of what returns: the row that began their nested pass; else NO_ROW */
    uint32_t depth;               /* of nested backward passes; most where there is no node */
    uint32_t entry;               /* its place in the order in which strands became ready */
    int64_t rank;
} Strand;

/* A piece of a linked list: a row that waits for another one. */
typedef struct {
    uint32_t row, next;
} Later;

/* A recorded event, a signal, a backward pass or a nested one. */
typedef struct {
    int64_t version;
    uint32_t row;
    uint32_t root, back; /* of a nested pass: the strands of its root, and of what returns */
    int32_t rows; /* of a backward pass: the last of each strand, a list of order.c */
} Version;

/* The order of rows on the host. Threads and strands are numbered from 0 as they occur. */
typedef struct {
    uint32_t threads, strands;
    Strand *strand;
    uint32_t *strand_of;    /* by row */
    uint32_t *next;         /* by row: the next one of the strand, or NO_ROW */
    uint32_t *missing;      /* by row: how many rows it waits for */
    uint32_t *first_later;  /* by row: the rows that wait for it, a list, or NO_ROW */
    VECTOR(Later) later;
    Version *versions; /* ascending */
    int64_t version_count;
} HostOrder;

void order_begin(HostOrder *order, const ReplayInput *input);
void order_end(HostOrder *order);

/* The place of a version, or -1: it is from before the trace. */
int64_t order_version(const HostOrder *order, int64_t version);

/* --- blocks.c ----------------------------------------------------------------------------------------------------- */

typedef struct BlockTable BlockTable;

/* `streams`: the device of each, in the order of their numbers; `record` is asked to record events. */
BlockTable *blocks_new(const ReplayInput *input, const int64_t *device_of, int32_t streams, MemoryRecord *record,
                   void *context);
Allocators *blocks_allocators(BlockTable *blocks);

/* Allocates, if need be beyond the capacity: the first time is the shortage. Says whether segments were given back before,
   so that the host waits for the device. Where there is no scratch memory, kernels that want as much do without from then
   on, as in the simulator. */
bool blocks_alloc(BlockTable *blocks, const TraceRow *row, int32_t stream);

/* The program was told of a full device and went on: that was no shortage, and peaks were within the capacity. */
void blocks_told(BlockTable *blocks);

/* These do nothing to a block from before the trace. */
void blocks_release(BlockTable *blocks, int64_t block);
void blocks_use(BlockTable *blocks, int64_t block, int32_t stream);

void blocks_count(const BlockTable *blocks, int32_t device, MemoryUse *use);
void blocks_shortage(const BlockTable *blocks, MemoryShortage *shortage);
void blocks_end(BlockTable *blocks);

/* --- what Python calls -------------------------------------------------------------------------------------------- */

typedef struct Replay Replay;

/* The caller keeps `input` and all arrays in it until the replay is freed. */
Replay *replay_new(const ReplayInput *input);

/* The number of a stream that the trace has, of those that a Holder is told of; default streams come first. */
int32_t replay_stream(const Replay *replay, int32_t device, int32_t stream);

/* How many streams there are besides those on which threads wait; writes the device of each, unless NULL. */
int64_t replay_streams(const Replay *replay, int64_t *device_of);

/* Who holds the memory of tasks; it lives as long as the replay. Else blocks have memory by rows. */
void replay_hold(Replay *replay, const Holder *holder);

/* REPLAY_STUCK: ask for the rows that wait for each other; REPLAY_FULL: a device of the Holder did not suffice; REPLAY_APART:
   a part of a meeting came and never began, as another one never came to the head of its stream. */
enum { REPLAY_DONE, REPLAY_STUCK, REPLAY_FULL, REPLAY_APART };

/* Runs all rows. */
int replay_run(Replay *replay);

void replay_times(const Replay *replay, const ReplayTimes *times);
void replay_tasks(const Replay *replay, const TaskTimes *times);

/* When all was over, and how much the clock did. */
void replay_ends(const Replay *replay, int64_t *now, int64_t *effort);
void replay_memory(const Replay *replay, int32_t device, MemoryUse *use);

/* The first request beyond a capacity; of no capacity: there was none. */
void replay_shortage(const Replay *replay, MemoryShortage *shortage);

/* A row that waits, from `*row` on, and the one that it waits for; 0: there is none. */
int replay_stuck(const Replay *replay, int64_t *row, int64_t *awaited);
void replay_free(Replay *replay);

#endif
