/* The agenda: a heap on (time, order of entry), with four below each, and a queue of what happens now.

   What is entered for now comes after all that was entered for this time before, and that is in the heap. So the queue
   needs no comparing; a third of all that happens is in it. */

#include "clock.h"

enum { BELOW = 4 };

/* Whether one appointment comes before another. */
static inline bool before(const Appointment *one, const Appointment *other)
{
    return one->time < other->time || (one->time == other->time && one->entry < other->entry);
}

/* Enters something that happens at `time`, which is not over. */
void agenda_add(Clock *clock, Time time, uint32_t kind, uint32_t number)
{
    assert(number < 1u << SUBJECT_BITS && time >= clock->now);
    Agenda *agenda = &clock->agenda;
    uint32_t subject = kind << SUBJECT_BITS | number;
    clock->entries++;
    if (time == clock->now) {
        PUSH(agenda->present, subject);
        return;
    }
    GROW(agenda->heap);
    Appointment added = {time, clock->entries, subject}, *items = agenda->heap.items;
    int64_t place = agenda->heap.count++;
    while (place) {
        int64_t above = (place - 1) / BELOW;
        if (!before(&added, &items[above]))
            break;
        items[place] = items[above];
        place = above;
    }
    items[place] = added;
}

/* Takes the first out of the heap. */
static Appointment heap_next(Agenda *agenda)
{
    Appointment *items = agenda->heap.items, first = items[0];
    int64_t count = --agenda->heap.count, place = 0;
    Appointment last = items[count];
    for (;;) {
        int64_t least = BELOW * place + 1, stop = least + BELOW < count ? least + BELOW : count;
        if (least >= count)
            break;
        for (int64_t other = least + 1; other < stop; other++)
            if (before(&items[other], &items[least]))
                least = other;
        if (!before(&items[least], &last))
            break;
        items[place] = items[least];
        place = least;
    }
    items[place] = last;
    return first;
}

/* Whether nothing else happens now. */
bool agenda_over(const Clock *clock)
{
    const Agenda *agenda = &clock->agenda;
    bool none = agenda->first_present == agenda->present.count;
    return none && (!agenda->heap.count || agenda->heap.items[0].time > clock->now);
}

/* Takes out what happens first, and makes its time the present; false: nothing is left. */
bool agenda_next(Clock *clock, uint32_t *subject)
{
    Agenda *agenda = &clock->agenda;
    bool none = agenda->first_present == agenda->present.count;
    if (none)
        agenda->first_present = agenda->present.count = 0;
    if (agenda->heap.count && (none || agenda->heap.items[0].time == clock->now)) {
        Appointment next = heap_next(agenda);
        clock->now = next.time;
        *subject = next.subject;
        return true;
    }
    if (none)
        return false;
    *subject = agenda->present.items[agenda->first_present++];
    return true;
}
