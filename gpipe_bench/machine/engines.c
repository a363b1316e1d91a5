/* Engines: each does one thing at a time. Of several operations that are ready for one, the one that became ready first
   runs first, then the one issued first; at one time, the one of the lower device, then of the lower stream. Whatever
   happens at one time is over before an engine is given away. */

#include "clock.h"

/* Orders turns: who was ready first, then who was issued first, then by stream. */
static int by_turn(const void *one, const void *other) {
    const Turn *a = one, *b = other;
    if (a->ready != b->ready)
        return a->ready < b->ready ? -1 : 1;
    if (a->called != b->called)
        return a->called < b->called ? -1 : 1;
    if (a->device != b->device)
        return a->device < b->device ? -1 : 1;
    if (a->stream != b->stream)
        return a->stream < b->stream ? -1 : 1;
    return (a->number > b->number) - (a->number < b->number);
}

/* Sorts turns. Most often they are sorted from the start. */
static void sort_turns(Turns *turns) {
    int64_t place = 1;
    while (place < turns->count && by_turn(&turns->items[place - 1], &turns->items[place]) < 0)
        place++;
    if (place < turns->count)
        qsort(turns->items, (size_t)turns->count, sizeof *turns->items, by_turn);
}

/* Occupies the engines of an operation; false: one is occupied, and it waits for that one. */
static bool occupy(Clock *clock, const Operation *operation, Turn turn) {
    for (uint32_t engine = 0; engine < operation->engine_count; engine++) {
        Engine *one = &clock->engines[operation->engines[engine]];
        if (one->occupied) {
            PUSH(one->waiting, turn);
            return false;
        }
    }
    for (uint32_t engine = 0; engine < operation->engine_count; engine++)
        clock->engines[operation->engines[engine]].occupied = true;
    return true;
}

static void start(Clock *clock, uint32_t place) {
    Operation *operation = &clock->operations.items[place];
    Time end = clock->now + operation->duration;
    operation->start = clock->now;
    agenda_add(clock, end > operation->issued ? end : operation->issued, SUBJECT_OPERATION, place);
    for (uint32_t thread = operation->starter; thread != NONE; thread = clock->threads[thread].starter)
        thread_resume(clock, thread);
    operation->starter = NONE;
}

/* Starts what is ready where engines are free. Nothing becomes ready meanwhile. */
void engines_settle(Clock *clock) {
    sort_turns(&clock->ready);
    clock->effort += clock->ready.count;
    for (int64_t turn = 0; turn < clock->ready.count; turn++) {
        Turn next = clock->ready.items[turn];
        const Operation *operation = &clock->operations.items[next.operation];
        /* What takes no time needs no engine. */
        if (!operation->duration || occupy(clock, operation, next))
            start(clock, next.operation);
    }
    clock->ready.count = 0;
}

/* An engine is free again: what waits for it may try again. */
void engine_release(Clock *clock, uint32_t number) {
    Engine *engine = &clock->engines[number];
    engine->occupied = false;
    for (int64_t place = 0; place < engine->waiting.count; place++)
        PUSH(clock->ready, engine->waiting.items[place]);
    engine->waiting.count = 0;
}
