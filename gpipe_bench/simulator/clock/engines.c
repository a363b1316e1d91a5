/* Engines: each does one thing at a time. Of several operations that are ready for one, the one that became ready first
   runs first, then the one issued first. Whatever happens at one time is over before an engine is given away. */

#include "clock.h"

static int compare_turns(const void *one, const void *other)
{
    const Turn *a = one, *b = other;
    if (a->ready != b->ready)
        return a->ready < b->ready ? -1 : 1;
    return a->number < b->number ? -1 : a->number > b->number;
}

/* Sorts by who was ready first, then by who was issued first. Most often there are very few. */
static void sort_turns(Turns *turns)
{
    if (turns->count > 16) {
        qsort(turns->items, (size_t)turns->count, sizeof(Turn), compare_turns);
        return;
    }
    for (int64_t sorted = 1; sorted < turns->count; sorted++) {
        Turn moved = turns->items[sorted];
        int64_t place = sorted;
        for (; place && compare_turns(&moved, &turns->items[place - 1]) < 0; place--)
            turns->items[place] = turns->items[place - 1];
        turns->items[place] = moved;
    }
}

/* Occupies the engines of an operation; false: one is occupied, and it waits for all of them. */
static bool occupy(Clock *clock, const Operation *operation, Turn turn)
{
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
static void start(Clock *clock, uint32_t place)
{
    Operation *operation = &clock->operations.items[place];
    Time end = clock->now + operation->duration;
    operation->start = clock->now;
    if (operation->queue != NONE)
        launches_start(clock, operation);
    agenda_add(clock, end > operation->issued ? end : operation->issued, SUBJECT_OPERATION, place);
    for (uint32_t thread = operation->starter; thread != NONE; thread = clock->threads[thread].starter)
        thread_resume(clock, thread);
    operation->starter = NONE;
}

/* Starts what is ready where engines are free: first come, first served, then in the order of issue. */
void engines_settle(Clock *clock)
{
    Turns settling = clock->ready;
    clock->ready = clock->settling;
    clock->settling = settling;
    sort_turns(&clock->settling);
    for (int64_t turn = 0; turn < clock->settling.count; turn++) {
        Turn next = clock->settling.items[turn];
        const Operation *operation = &clock->operations.items[next.operation];
        /* What takes no time needs no engine. */
        if (!operation->duration || occupy(clock, operation, next))
            start(clock, next.operation);
    }
    clock->settling.count = 0;
}

/* What waits for an engine may try again. */
static void wake(Clock *clock, uint32_t number)
{
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
void engine_release(Clock *clock, uint32_t number)
{
    clock->engines[number].occupied = false;
    if (clock->engines[number].waiting.count)
        wake(clock, number);
}
