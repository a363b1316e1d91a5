/* Host threads: they pause and go on, and pass the time that their launches take; and the loop that runs everything. */

#include "clock.h"

void thread_resume(Clock *clock, uint32_t thread) {
    agenda_add(clock, clock->now, SUBJECT_THREAD, thread);
}

/* A thread pauses until a time, or until somebody resumes it (NEVER). Always true. */
bool thread_pause(Clock *clock, uint32_t thread, Time until) {
    clock->threads[thread].until = until;
    return true;
}

/* --- time passes -------------------------------------------------------------------------------------------------- */

/* Waits where the launch queue of `room` is full; says whether the thread pauses. */
static bool await_room(Clock *clock, Thread *own, uint32_t thread) {
    Time until;
    uint32_t first;
    if (!stream_room(clock, own->room, &until, &first)) {
        /* Resumed when it starts: the room that it leaves is known then. */
        operation_after_start(clock, first, thread);
        return thread_pause(clock, thread, NEVER);
    }
    own->room = NONE;
    until = until > own->done ? until : own->done;
    return until > clock->now && thread_pause(clock, thread, until);
}

/* The host's time for launches that a thread makes now. With an interpreter lock, it comes after those of all threads
   that have begun before, and it takes another time than alone. */
Time launches_ns(Clock *clock, int64_t launches) {
    const Costs *costs = &clock->costs;
    Time own = costs->launch_ns * launches;
    if (!costs->lock_permille || !launches)
        return own;
    bool alone = clock->lock_free <= clock->now;
    Time held = own * costs->lock_permille / 1000;
    if (alone)
        clock->lock_free = clock->now + (held < own ? held : own);
    else
        clock->lock_free += held;
    Time waited = clock->lock_free - clock->now;
    return waited > own ? waited : own;
}

/* The host's time for what it issued: its calls, and a wait where the launch queue is full. */
bool thread_busy(Clock *clock, uint32_t thread, uint32_t stream, Time host_ns) {
    Thread *own = &clock->threads[thread];
    own->done = clock->now + host_ns;
    /* Even if it is none, other threads may come in between. */
    if (!clock->costs.queue_depth)
        return thread_pause(clock, thread, own->done);
    own->room = stream;
    return await_room(clock, own, thread);
}

/* --- the loop ----------------------------------------------------------------------------------------------------- */

static void run_thread(Clock *clock, uint32_t thread) {
    Thread *own = &clock->threads[thread];
    own->until = NEVER;
    bool paused = own->room != NONE && await_room(clock, own, thread);
    while (!paused)
        paused = clock->step(clock, thread);
    if (own->until != NEVER)
        agenda_add(clock, own->until, SUBJECT_THREAD, thread);
}

void clock_loop(Clock *clock) {
    while (!clock->full) {
        if (clock->ready.count && agenda_over(clock)) {
            engines_settle(clock);
            continue;
        }
        uint32_t next;
        if (!agenda_next(clock, &next))
            return;
        uint32_t number = next & ((1u << SUBJECT_BITS) - 1);
        switch (next >> SUBJECT_BITS) {
        case SUBJECT_OPERATION: operation_ends(clock, number); break;
        case SUBJECT_THREAD: run_thread(clock, number); break;
        default: clock->rooted(clock, number);
        }
    }
}
