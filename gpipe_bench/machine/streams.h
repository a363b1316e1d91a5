/* Time, and what happens in it: the agenda, streams and engines. */

#ifndef STREAMS_H
#define STREAMS_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "grow.h"
#include "memory.h"

/* What Python does not call is called directly. */
#pragma GCC visibility push(hidden)

#define NONE UINT32_MAX
#define NEVER INT64_MIN
#define UNKNOWN (-1)

/* Numbers that are all NONE. */
static inline uint32_t *nones(int64_t count) {
    uint32_t *made = zeros(count, sizeof(uint32_t));
    for (int64_t place = 0; place < count; place++)
        made[place] = NONE;
    return made;
}

/* Nanoseconds. */
typedef int64_t Time;

/* --- agenda.c ----------------------------------------------------------------------------------------------------- */

enum { SUBJECT_BITS = 30, SUBJECT_OPERATION = 0, SUBJECT_THREAD, SUBJECT_ROOT };

/* What happens: an operation ends, a thread goes on, or the root of a nested pass comes back. */
typedef struct {
    Time time;
    uint32_t subject; /* a number, and above SUBJECT_BITS what it numbers */
    int32_t next;     /* the next one in its bucket, or -1 */
} Appointment;

typedef struct {
    Time earliest;
    int32_t first, last;
} Bucket;

enum { DIGIT_BITS = 6, DIGITS = 1 << DIGIT_BITS, LEVELS = 64 / DIGIT_BITS + 1 };

typedef struct {
    PLACES(Appointment) entered;
    Bucket buckets[LEVELS][DIGITS];
    uint64_t filled[LEVELS]; /* a bit for each bucket that is not empty; others hold nothing of use */
} Agenda;

typedef struct Clock Clock;

void agenda_add(Clock *clock, Time time, uint32_t kind, uint32_t number);
bool agenda_over(const Clock *clock);
bool agenda_next(Clock *clock, uint32_t *subject);
void agenda_free(Clock *clock);

/* --- streams.c ---------------------------------------------------------------------------------------------------- */

/* An operation that may have ended since: its place is used again, its number is not. */
typedef struct {
    uint32_t place, number;
} OperationRef;

typedef VECTOR(OperationRef) OperationRefs;

/* A piece of a linked list: of followers (operations, and events above EVENT_BIT), or of threads. */
typedef struct {
    uint32_t subject, next;
} Link;

typedef struct {
    uint32_t first, last;
} List;

#define EVENT_BIT 0x80000000u

/* Engines of an operation: those of both ends of a copy, and two buses. */
enum { ENGINES = 4 };

/* What runs on streams, until it has ended. */
typedef struct {
    Time duration;
    Time called;       /* when the host began to issue it */
    Time issued;       /* when the host has issued the last of it; it cannot end before */
    Time start;        /* UNKNOWN before */
    uint32_t number;   /* in the order of issue, from 1; 0: the place is free */
    uint32_t missing;  /* operations that it waits for */
    List followers;    /* what waits for its end */
    uint32_t starter;  /* the first thread that waits for its start, or NONE */
    const int64_t *launch_ends; /* as in Order */
    int64_t before;    /* launches of its stream before its own */
    uint32_t launches;
    uint32_t queue;    /* the stream whose launch queue it is in, or NONE */
    uint32_t queued;   /* the next one there, or NONE */
    uint32_t record;   /* its row, or NONE */
    uint32_t streams[2]; /* that it belongs to; if there are more, two of them */
    uint32_t passed;   /* another stream that has waited for it, or NONE: operations there begin after it ... */
    uint32_t since;    /* ... from this number on */
    uint32_t engines[ENGINES];
    uint8_t engine_count;
} Operation;

typedef struct {
    OperationRefs awaited; /* operations that the next one waits for, some of which may have ended */
    int64_t launched;      /* launches so far */
    List queued;           /* operations with launches that have not ended; those before leave room for all launches */
} Stream;

/* An operation that is ready for its engines; the order in which they are given away. */
typedef struct {
    Time ready; /* when it had nothing left to wait for but engines */
    Time called;
    uint32_t device, stream, number, operation;
} Turn;

typedef VECTOR(Turn) Turns;

typedef struct {
    Turns waiting;
    bool occupied;
} Engine;

/* What an operation needs besides its streams. */
typedef struct {
    Time duration, host_ns;
    uint32_t launches;
    uint32_t engines[ENGINES];
    uint8_t engine_count;
    const int64_t *launch_ends; /* when each launch has run, after the start; NULL: evenly */
    uint32_t record;            /* the row that orders it, or NONE */
} Order;

/* Adds a bus to the engines, if there is one; those of buses come after `first` others. */
static inline void order_bus(Order *order, uint32_t first, int32_t bus) {
    if (bus >= 0)
        order->engines[order->engine_count++] = first + (uint32_t)bus;
}

void streams_start(Clock *clock, uint32_t engines);
void streams_free(Clock *clock);
uint32_t stream_add(Clock *clock, uint32_t device);
void stream_pending(Clock *clock, uint32_t stream, OperationRefs *found);
void stream_await(Clock *clock, uint32_t waiter, const OperationRef *awaited, int64_t count);
void stream_wait(Clock *clock, uint32_t waiter, uint32_t awaited);
int32_t stream_record(void *clock, int32_t stream, int32_t event);
uint32_t stream_issue(Clock *clock, const uint32_t *streams, uint32_t count, const Order *order);
uint32_t stream_meet(Clock *clock, uint32_t parts, uint32_t record);
void stream_join(Clock *clock, uint32_t place, uint32_t stream, const Order *order);
bool stream_room(Clock *clock, uint32_t stream, Time *until, uint32_t *operation);
void operation_after_start(Clock *clock, uint32_t operation, uint32_t thread);
void operation_ends(Clock *clock, uint32_t operation);

/* --- engines.c ---------------------------------------------------------------------------------------------------- */

void engines_settle(Clock *clock);
void engine_release(Clock *clock, uint32_t engine);

#pragma GCC visibility pop

#endif
