/* The agenda: a radix heap (Ahuja, Mehlhorn, Orlin and Tarjan, Journal of the ACM 37, 1990).

       bucket 0   what happens now
       bucket b   what happens at times whose highest bit that differs from the present is bit b - 1

   Time never goes back. When bucket 0 is empty, the first of its successors that is not empty holds what happens next:
   its earliest time becomes the present, and all that is in it moves to lower buckets, which are empty until then. So
   whatever happens at one time stays in the order of entry, without any comparing. */

#include "clock.h"

static uint32_t bucket_of(const Clock *clock, Time time)
{
    return time == clock->now ? 0 : 64 - (uint32_t)__builtin_clzll((uint64_t)(time ^ clock->now));
}

static void put(Clock *clock, Appointment one)
{
    uint32_t bucket = bucket_of(clock, one.time);
    PUSH(clock->agenda.buckets[bucket], one);
    clock->agenda.filled |= (uint64_t)1 << bucket;
}

/* Enters something that happens at `time`, which is not over. */
void agenda_add(Clock *clock, Time time, uint32_t kind, uint32_t number)
{
    assert(number < 1u << SUBJECT_BITS && time >= clock->now);
    clock->entries++;
    put(clock, (Appointment){time, kind << SUBJECT_BITS | number});
}

/* Whether nothing else happens now. */
bool agenda_over(const Clock *clock)
{
    return clock->agenda.over == clock->agenda.buckets[0].count;
}

/* Goes on to the time of what happens next; false: nothing is left. */
static bool go_on(Clock *clock)
{
    Agenda *agenda = &clock->agenda;
    agenda->over = agenda->buckets[0].count = 0;
    agenda->filled &= ~(uint64_t)1;
    if (!agenda->filled)
        return false;
    Bucket *next = &agenda->buckets[__builtin_ctzll(agenda->filled)];
    agenda->filled &= agenda->filled - 1;
    Time earliest = next->items[0].time;
    for (int64_t place = 1; place < next->count; place++)
        earliest = next->items[place].time < earliest ? next->items[place].time : earliest;
    clock->now = earliest;
    for (int64_t place = 0; place < next->count; place++)
        put(clock, next->items[place]);
    next->count = 0;
    return true;
}

/* Takes out what happens first, and makes its time the present; false: nothing is left. */
bool agenda_next(Clock *clock, uint32_t *subject)
{
    if (agenda_over(clock) && !go_on(clock))
        return false;
    *subject = clock->agenda.buckets[0].items[clock->agenda.over++].subject;
    return true;
}

void agenda_free(Clock *clock)
{
    for (uint32_t bucket = 0; bucket < BUCKETS; bucket++)
        free(clock->agenda.buckets[bucket].items);
}
