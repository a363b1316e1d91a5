/* Engines: each does one thing at a time. Of several operations that are ready for one, the one that became ready first
   runs first, then the one issued first. Whatever happens at one time is over before an engine is given away. */

#include "clock.h"

/* Whether one operation gets its engines before another: who was ready first, then who was issued first. */
static bool comes_before(const Turn *one, const Turn *other) {
    return one->ready != other->ready ? one->ready < other->ready : one->number < other->number;
}

/* The end of the sorted turns that begin at a place. */
static int64_t run_end(const Turns *turns, int64_t place) {
    for (place++; place < turns->count && comes_before(&turns->items[place - 1], &turns->items[place]);)
        place++;
    return place < turns->count ? place : turns->count;
}

/* Sorts turns: merges neighbours that are sorted until all are. Most often they are from the start. */
static void sort_turns(Turns *turns, Turns *merged) {
    while (run_end(turns, 0) < turns->count) {
        merged->count = 0;
        for (int64_t start = 0, middle, stop; start < turns->count; start = stop) {
            middle = run_end(turns, start);
            stop = run_end(turns, middle);
            for (int64_t one = start, other = middle; one < middle || other < stop;) {
                bool first = other == stop || (one < middle && comes_before(&turns->items[one], &turns->items[other]));
                PUSH(*merged, turns->items[first ? one++ : other++]);
            }
        }
        Turns sorted = *merged;
        *merged = *turns;
        *turns = sorted;
    }
}

/* Occupies the engines of an operation; false: one is occupied, and it waits for all of them. */
static bool occupy(Clock *clock, const Operation *operation, Turn turn) {
    bool all_free = true;
    for (uint32_t engine = 0; engine < operation->engine_count; engine++)
        all_free = all_free && !clock->engines[operation->engines[engine]].occupied;
    for (uint32_t engine = 0; engine < operation->engine_count; engine++) {
        Engine *one = &clock->engines[operation->engines[engine]];
        if (all_free)
            one->occupied = true;
        else
            PUSH(one->waiting, turn);
    }
    return all_free;
}

/* Starts an operation whose engines it has. */
static void start(Clock *clock, uint32_t place) {
    Operation *operation = &clock->operations.items[place];
    Time end = clock->now + operation->duration;
    operation->start = clock->now;
    agenda_add(clock, end > operation->issued ? end : operation->issued, SUBJECT_OPERATION, place);
    for (uint32_t thread = operation->starter; thread != NONE; thread = clock->threads[thread].starter)
        thread_resume(clock, thread);
    operation->starter = NONE;
}

/* Starts what is ready where engines are free: first come, first served, then in the order of issue. */
void engines_settle(Clock *clock) {
    sort_turns(&clock->ready, &clock->settling);
    Turns settling = clock->ready;
    clock->ready = clock->settling;
    clock->ready.count = 0;
    clock->settling = settling;
    for (int64_t turn = 0; turn < clock->settling.count; turn++) {
        Turn next = clock->settling.items[turn];
        const Operation *operation = &clock->operations.items[next.operation];
        /* What takes no time needs no engine. */
        if (!operation->duration || occupy(clock, operation, next))
            start(clock, next.operation);
    }
}

/* What waits for an engine may try again. */
static void wake(Clock *clock, uint32_t number) {
    Engine *engine = &clock->engines[number];
    for (int64_t place = 0; place < engine->waiting.count; place++) {
        Turn waiter = engine->waiting.items[place];
        const Operation *operation = &clock->operations.items[waiter.operation];
        for (uint32_t other = 0; other < operation->engine_count; other++) {
            Engine *one = &clock->engines[operation->engines[other]];
            if (one == engine)
                continue;
            for (int64_t found = 0; found < one->waiting.count; found++)
                if (one->waiting.items[found].number == waiter.number) {
                    one->waiting.items[found] = one->waiting.items[--one->waiting.count];
                    break;
                }
        }
        PUSH(clock->ready, waiter);
    }
    engine->waiting.count = 0;
}

/* An engine is free again. */
void engine_release(Clock *clock, uint32_t number) {
    clock->engines[number].occupied = false;
    if (clock->engines[number].waiting.count)
        wake(clock, number);
}
