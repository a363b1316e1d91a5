/* The agenda: a radix heap (Ahuja, Mehlhorn, Orlin and Tarjan, Journal of the ACM 37, 1990).

   Times are numbers of DIGITS digits. A bucket holds what happens at times that agree with the present in all digits
   above its level, and have its digit there:

       level 0   one bucket for each time that differs from the present in the last digit only; that of the present too
       level 1   one bucket for DIGITS neighbouring times, and so on

   Time never goes back. When nothing happens at the present any more, the first bucket that is not empty holds what
   happens next: its earliest time becomes the present, and all that is in it moves to lower levels, which are empty
   until then. So whatever happens at one time stays in the order of entry, without any comparing. */

#include "clock.h"

/* What happens now. */
static Bucket *present(Agenda *agenda, Time now) {
    return &agenda->buckets[0][(uint64_t)now % DIGITS];
}

static void put(Clock *clock, Appointment one) {
    Agenda *agenda = &clock->agenda;
    uint64_t differing = (uint64_t)(one.time ^ clock->now);
    uint32_t level = differing ? (63 - (uint32_t)__builtin_clzll(differing)) / DIGIT_BITS : 0;
    uint32_t digit = (uint32_t)(one.time >> level * DIGIT_BITS) % DIGITS;
    PUSH(agenda->buckets[level][digit], one);
    agenda->filled[level] |= (uint64_t)1 << digit;
}

/* Enters something that happens at `time`, which is not over. */
void agenda_add(Clock *clock, Time time, uint32_t kind, uint32_t number) {
    assert(number < 1u << SUBJECT_BITS && time >= clock->now);
    clock->entries++;
    put(clock, (Appointment){time, kind << SUBJECT_BITS | number});
}

/* Whether nothing else happens now. */
bool agenda_over(Clock *clock) {
    return clock->agenda.over == present(&clock->agenda, clock->now)->count;
}

/* Goes on to the time of what happens next; false: nothing is left. */
static bool go_on(Clock *clock) {
    Agenda *agenda = &clock->agenda;
    agenda->over = present(agenda, clock->now)->count = 0;
    agenda->filled[0] &= ~((uint64_t)1 << clock->now % DIGITS);
    uint32_t level = 0;
    while (level < LEVELS && !agenda->filled[level])
        level++;
    if (level == LEVELS)
        return false;
    Bucket *next = &agenda->buckets[level][__builtin_ctzll(agenda->filled[level])];
    clock->now = next->items[0].time;
    if (!level)
        return true;
    agenda->filled[level] &= agenda->filled[level] - 1;
    for (int64_t place = 1; place < next->count; place++)
        clock->now = next->items[place].time < clock->now ? next->items[place].time : clock->now;
    for (int64_t place = 0; place < next->count; place++)
        put(clock, next->items[place]);
    next->count = 0;
    return true;
}

/* Takes out what happens first, and makes its time the present; false: nothing is left. */
bool agenda_next(Clock *clock, uint32_t *subject) {
    if (agenda_over(clock) && !go_on(clock))
        return false;
    *subject = present(&clock->agenda, clock->now)->items[clock->agenda.over++].subject;
    return true;
}

void agenda_free(Clock *clock) {
    for (uint32_t level = 0; level < LEVELS; level++)
        for (uint32_t digit = 0; digit < DIGITS; digit++)
            free(clock->agenda.buckets[level][digit].items);
}
