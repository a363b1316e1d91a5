/* How long devices were busy in a window of time, and with what, see gpipe_bench/results/breakdown.py. */

#include "clock.h"

typedef struct {
    Time start, end;
} Span;

typedef VECTOR(Span) Spans;

/* Sorts spans by their starts. Tasks are issued nearly in this order, so few of them move, and not far. */
static void sort_spans(Spans *spans) {
    for (int64_t sorted = 1; sorted < spans->count; sorted++) {
        Span moved = spans->items[sorted];
        int64_t place = sorted;
        for (; place && moved.start < spans->items[place - 1].start; place--)
            spans->items[place] = spans->items[place - 1];
        spans->items[place] = moved;
    }
}

/* The length of the union of some spans. */
static Time covered(Spans *spans) {
    sort_spans(spans);
    Time length = 0, reached = INT64_MIN;
    for (int64_t place = 0; place < spans->count; place++) {
        Span span = spans->items[place];
        Time start = span.start > reached ? span.start : reached;
        if (span.end > start)
            length += span.end - start;
        reached = span.end > reached ? span.end : reached;
    }
    return length;
}

/* Adds a span. One that overlaps the newest, or follows it at once, makes that one longer. */
static void add_span(Spans *spans, Span added) {
    Span *newest = spans->count ? &spans->items[spans->count - 1] : NULL;
    if (!newest || added.start < newest->start || added.start > newest->end)
        PUSH(*spans, added);
    else if (added.end > newest->end)
        newest->end = added.end;
}

/* Adds what a task takes of a window to the device of its partition, and to the device that runs or sends it. */
static void add_task(const Clock *clock, const Record *record, Span window, Busy *busy, Spans *own, Spans *running) {
    const Node *node = &clock->graph.nodes.items[record->node];
    Span span = {record->start > window.start ? record->start : window.start,
                 record->end < window.end ? record->end : window.end};
    if (span.end <= span.start)
        return;
    int32_t device = clock->input->device_of[node->j];
    if (record->kind == KIND_recompute)
        busy[device].recompute_ns += span.end - span.start;
    else if (record->kind < KIND_copy)
        busy[device].compute_ns += span.end - span.start;
    add_span(&own[device], span);
    add_span(&running[host_device(clock, record)], span);
}

/* The use of each device from `start` to `end` by some tasks. Computations of one device never overlap. */
void clock_busy(const Clock *clock, int64_t first, int64_t last, Time start, Time end, Busy *busy) {
    int64_t devices = clock->input->devices;
    Spans *own = zeros(devices, sizeof(Spans)), *running = zeros(devices, sizeof(Spans));
    for (int64_t device = 0; device < devices; device++)
        busy[device] = (Busy){0};
    for (int64_t row = first; row < last; row++)
        add_task(clock, &clock->records.items[row], (Span){start, end}, busy, own, running);
    for (int64_t device = 0; device < devices; device++) {
        Busy *found = &busy[device];
        found->copy_ns = covered(&own[device]) - found->compute_ns - found->recompute_ns;
        found->occupied_ns = covered(&running[device]);
        free(own[device].items);
        free(running[device].items);
    }
    free(own);
    free(running);
}
