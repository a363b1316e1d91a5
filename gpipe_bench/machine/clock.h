/* The clock: streams, engines and host threads in virtual time.

       threads.c   host threads go through the rows of a trace
       host.c      passes the time that launches take a host thread, and waits where a launch queue is full
            |
       streams.c   operations on streams, launch queues, events
       engines.c   what runs where, when several could
       agenda.c    what happens when, and in which order what happens at one time

   A host thread is a struct with a state. What it does next is one thing, and says whether the thread pauses; a thread
   that pauses goes on at `until`, or when somebody resumes it. What happens at one time is decided by the order of entry
   into the agenda, as everything here is; nothing depends on addresses or on the host. */

#ifndef CLOCK_H
#define CLOCK_H

#include "streams.h"

#pragma GCC visibility push(hidden)

/* What the hardware costs. */
typedef struct {
    Time launch_ns;        /* of the host, for a kernel or a copy */
    int64_t lock_permille; /* host time of a launch where several threads launch, of `launch_ns`; 0: no lock */
    int64_t queue_depth;   /* launches that a stream holds before the host waits; 0: no limit */
} Costs;

typedef struct {
    Time until;       /* of a pause: when it goes on; NEVER: when it is resumed */
    Time done;        /* of a thread that waits for room: when its own calls are over */
    Time owed;        /* for what it has issued at once and not yet spent */
    bool joins;       /* whether it issues more at once */
    uint32_t room;    /* the stream whose launch queue it waits for, or NONE */
    uint32_t starter; /* the next thread that waits for the same operation to start, or NONE */
    uint32_t next;    /* its row */
    uint8_t state;
} Thread;

/* When a host thread came to a row, and when what it issued there began and ended. */
typedef struct {
    Time issue, start, end;
} Record;

struct Clock {
    Costs costs;
    bool (*step)(Clock *clock, uint32_t thread);    /* what a thread does next; says whether it pauses */
    void (*rooted)(Clock *clock, uint32_t number);  /* the thread of the CPU comes to the root of a nested pass */
    Allocators *allocators; /* they are told of events that pass */
    bool full;      /* whether a device's memory did not suffice: then all is over */
    Time now;
    int64_t effort; /* moves in the agenda, operations that streams were found to wait for, attempts to start one */
    Agenda agenda;
    PLACES(Operation) operations;
    uint32_t last_number;
    PLACES(Link) links;
    OperationRefs found;     /* by stream_record */
    VECTOR(Stream) streams;
    VECTOR(uint32_t) device_of;
    Engine *engines;
    uint32_t engine_count;
    Turns ready;
    Thread *threads;
    Time lock_free; /* when the threads that have launched so far give the interpreter lock back */
    VECTOR(Record) records; /* by row */
};

/* --- host.c ------------------------------------------------------------------------------------------------------- */

Time launches_ns(Clock *clock, int64_t launches);
bool thread_busy(Clock *clock, uint32_t thread, uint32_t stream, Time host_ns);
void thread_resume(Clock *clock, uint32_t thread);
bool thread_pause(Clock *clock, uint32_t thread, Time until);
void clock_loop(Clock *clock);

#pragma GCC visibility pop

#endif
