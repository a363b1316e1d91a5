/* A running replay: its clock and its own state. */

#ifndef GPIPE_BENCH_REPLAY_STATE_H
#define GPIPE_BENCH_REPLAY_STATE_H

#include "replay.h"

#include "clock.h"

typedef VECTOR(uint32_t) Strands;

/* A nested pass: whether its root has come back from the thread of the CPU, and whether it has run. */
typedef struct {
    bool rooted, finished;
} Nested;

struct Replay {
    Clock clock; /* first, as threads are given this */
    const ReplayInput *input;
    HostOrder order;
    BlockTable *blocks;
    const Holder *holder; /* or NULL */
    bool *told; /* by task: whether the holder was */
    int64_t stream_names;   /* of a device, from 0 */
    uint32_t *streams;      /* by device and name; those of the trace, then one of each thread, on which it waits */
    uint32_t first_own;     /* of the threads' streams */
    OperationRefs recorded; /* operations that events wait for */
    VECTOR(uint32_t) recorded_rows; /* and whose rows these are */
    int64_t *first_recorded, *end_recorded; /* of each version */
    bool *asleep;  /* by thread: whether it waits for a row of another one, or for a strand that is ready */
    Strands *ready; /* by thread: strands that wait for nothing, a heap */
    uint32_t entries; /* of strands so far */
    Strands *frames; /* by thread: its nested passes, the innermost last, by the places of their versions */
    Nested *nested;  /* by the place of a version */
    int64_t latency; /* latencies used so far */
    bool *has_gradients; /* by the number of some parameters */
    int64_t *turn; /* by row: its place, from 1, in the order in which threads came to rows; 0: none has yet */
    int64_t turns;
    int32_t meetings;   /* the highest number of one */
    uint32_t *meeting;  /* by its number: its operation, or NONE */
    uint32_t *first_of; /* and the row of its first part, or NONE */
};

/* The number of a stream. */
static inline uint32_t *stream_of(const Replay *replay, int32_t device, int32_t stream)
{
    return &replay->streams[device * replay->stream_names + stream];
}

/* A strand waits for nothing any more. */
void add_ready(Replay *replay, uint32_t strand);

/* The root of a nested pass comes back. */
void row_rooted(Clock *clock, uint32_t version);

/* One thing that a thread does; says whether it pauses. */
bool row_step(Clock *clock, uint32_t thread);

#endif
