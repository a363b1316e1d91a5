/* The agenda: a radix heap (Ahuja, Mehlhorn, Orlin and Tarjan, Journal of the ACM 37, 1990).

   Times are numbers of DIGITS digits. A bucket holds what happens at times that agree with the present in all digits
   above its level, and have its digit there:

       level 0   one bucket for each time that differs from the present in the last digit only; that of the present too
       level 1   one bucket for DIGITS neighbouring times, and so on

   Time never goes back. When nothing happens at the present any more, the first bucket that is not empty holds what
   happens next: its earliest time becomes the present, and all that is in it moves to lower levels, which are empty
   until then. So whatever happens at one time stays in the order of entry, without any comparing. */

#include "clock.h"

/* Appends to the bucket where its time belongs. */
static void put(Clock *clock, int32_t place) {
    Agenda *agenda = &clock->agenda;
    clock->effort++;
    Time time = agenda->entered.items[place].time;
    uint64_t differing = (uint64_t)(time ^ clock->now);
    uint32_t level = differing ? (63 - (uint32_t)__builtin_clzll(differing)) / DIGIT_BITS : 0;
    uint32_t digit = (uint32_t)(time >> level * DIGIT_BITS) % DIGITS;
    Bucket *bucket = &agenda->buckets[level][digit];
    agenda->entered.items[place].next = -1;
    if (agenda->filled[level] >> digit & 1) {
        agenda->entered.items[bucket->last].next = place;
        bucket->last = place;
        bucket->earliest = time < bucket->earliest ? time : bucket->earliest;
    } else {
        agenda->filled[level] |= (uint64_t)1 << digit;
        *bucket = (Bucket){time, place, place};
    }
}

/* Enters something that happens at `time`, which is not over. */
void agenda_add(Clock *clock, Time time, uint32_t kind, uint32_t number) {
    assert(number < 1u << SUBJECT_BITS && time >= clock->now);
    int32_t place;
    TAKE_PLACE(clock->agenda.entered, next, place);
    clock->agenda.entered.items[place] = (Appointment){time, kind << SUBJECT_BITS | number, -1};
    put(clock, place);
}

/* Whether nothing else happens now. */
bool agenda_over(const Clock *clock) {
    return !(clock->agenda.filled[0] >> clock->now % DIGITS & 1);
}

/* Goes on to the time of what happens next; false: nothing is left. */
static bool go_on(Clock *clock) {
    Agenda *agenda = &clock->agenda;
    uint32_t level = 0;
    while (level < LEVELS && !agenda->filled[level])
        level++;
    if (level == LEVELS)
        return false;
    Bucket next = agenda->buckets[level][__builtin_ctzll(agenda->filled[level])];
    clock->now = next.earliest;
    if (!level)
        return true;
    agenda->filled[level] &= agenda->filled[level] - 1;
    for (int32_t place = next.first, after; place >= 0; place = after) {
        after = agenda->entered.items[place].next;
        put(clock, place);
    }
    return true;
}

/* Takes out what happens first, and makes its time the present; false: nothing is left. */
bool agenda_next(Clock *clock, uint32_t *subject) {
    Agenda *agenda = &clock->agenda;
    if (agenda_over(clock) && !go_on(clock))
        return false;
    uint32_t digit = clock->now % DIGITS;
    Bucket *present = &agenda->buckets[0][digit];
    int32_t place = present->first;
    *subject = agenda->entered.items[place].subject;
    present->first = agenda->entered.items[place].next;
    if (present->first < 0)
        agenda->filled[0] &= ~((uint64_t)1 << digit);
    LEAVE_PLACE(agenda->entered, next, place);
    return true;
}

void agenda_free(Clock *clock) {
    free(clock->agenda.entered.items);
}
