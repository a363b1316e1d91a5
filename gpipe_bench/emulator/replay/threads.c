/* Host threads go through their rows. */

#include "state.h"

/* The state of a thread: it comes to a row, or has issued it. */
enum { ARRIVES, ISSUED };

/* --- strands that are ready ---------------------------------------------------------------------------------------- */

/* Whether one strand runs before another of the same thread. */
static bool outranks(const Replay *replay, uint32_t first, uint32_t second)
{
    const Strand *one = &replay->order.strand[first], *other = &replay->order.strand[second];
    if (one->depth != other->depth)
        return one->depth > other->depth;
    return one->rank != other->rank ? one->rank > other->rank : one->first < other->first;
}

/* A strand waits for nothing any more: it joins those of its thread, a heap. */
void add_ready(Replay *replay, uint32_t strand)
{
    Strands *ready = &replay->ready[replay->order.strand[strand].thread];
    PUSH(*ready, strand);
    int64_t place = ready->count - 1;
    for (; place && outranks(replay, strand, ready->items[(place - 1) / 2]); place = (place - 1) / 2)
        ready->items[place] = ready->items[(place - 1) / 2];
    ready->items[place] = strand;
}

/* Gives a thread the first of its strands that are ready; false: there is none. */
static bool next_strand(Replay *replay, uint32_t thread)
{
    Strands *ready = &replay->ready[thread];
    if (!ready->count)
        return false;
    replay->clock.threads[thread].next = replay->order.strand[ready->items[0]].first;
    uint32_t last = ready->items[--ready->count];
    int64_t count = ready->count, place = 0;
    for (int64_t below = 1; below < count; below = 2 * place + 1) {
        if (below + 1 < count && outranks(replay, ready->items[below + 1], ready->items[below]))
            below++;
        if (!outranks(replay, ready->items[below], last))
            break;
        ready->items[place] = ready->items[below];
        place = below;
    }
    ready->items[place] = last;
    return true;
}

/* --- rows that wait for others ------------------------------------------------------------------------------------ */

/* The thread pauses until somebody wakes it. Always true. */
static bool sleeps(Replay *replay, uint32_t thread)
{
    replay->asleep[thread] = true;
    return thread_pause(&replay->clock, thread, NEVER);
}

static void wake(Replay *replay, uint32_t thread)
{
    if (replay->asleep[thread])
        thread_resume(&replay->clock, thread);
    replay->asleep[thread] = false;
}

/* A row waits for nothing any more. */
static void release(Replay *replay, uint32_t row)
{
    const Strand *strand = &replay->order.strand[replay->order.strand_of[row]];
    int64_t at = replay->clock.threads[strand->thread].next;
    if (replay->turn[row])
        blocks_release(replay->blocks, replay->input->rows[row].block);
    else if (row == strand->first)
        add_ready(replay, replay->order.strand_of[row]);
    if (at == row || (at == NO_ROW && row == strand->first))
        wake(replay, strand->thread);
}

/* A thread has done its row. */
static void leave_row(Replay *replay, uint32_t thread)
{
    HostOrder *order = &replay->order;
    Thread *own = &replay->clock.threads[thread];
    uint32_t row = (uint32_t)own->next;
    own->next = order->next[row];
    for (uint32_t place = order->first_later[row]; place != NO_ROW; place = order->later.items[place].next) {
        uint32_t later = order->later.items[place].row;
        if (!--order->missing[later])
            release(replay, later);
    }
}

/* --- operations --------------------------------------------------------------------------------------------------- */

/* Issues a kernel, a copy or a wait for the host; says whether the thread pauses. */
static bool issue(Replay *replay, uint32_t thread, uint32_t number)
{
    const TraceRow *row = &replay->input->rows[number];
    uint32_t devices = (uint32_t)replay->input->devices, device = (uint32_t)row->device, peer = (uint32_t)row->peer;
    Time known = replay->input->duration_ns[number];
    Time host_ns = row->kind == ROW_update ? known : host_takes(&replay->clock, row->launches);
    Order order = {known > 0 ? known : 0, host_ns, (uint32_t)row->launches, {device}, 1, NULL};
    uint32_t streams[2] = {*stream_of(replay, row->device, row->stream), NONE}, count = 1;
    if (row->kind == ROW_copy) {
        bool arrives = row->name == replay->input->from_host && row->peer < 0;
        order.engines[0] = (arrives ? 2 : 1) * devices + device;
        if (row->peer >= 0) {
            streams[count++] = *stream_of(replay, row->peer, row->peer_stream);
            order.engines[order.engine_count++] = 2 * devices + peer;
        }
        order_bus(&order, 3 * devices, replay->input->bus[number]);
        order_bus(&order, 3 * devices, replay->input->second_bus[number]);
    }
    host_mark(&replay->clock, stream_issue(&replay->clock, streams, count, &order), number, true, true);
    return (row->launches || row->kind == ROW_update) && host_spends(&replay->clock, thread, streams[0], host_ns);
}

/* The thread pauses until what its own stream waits for has run; false: nothing has to. */
static bool await_own_stream(Replay *replay, uint32_t thread)
{
    Clock *clock = &replay->clock;
    uint32_t own = replay->first_own + thread;
    if (!clock->streams.items[own].awaited.count)
        return false;
    Order order = {0};
    operation_after_start(clock, stream_issue(clock, &own, 1, &order), thread);
    return thread_pause(clock, thread, NEVER);
}

/* The thread waits for all streams of a device, or for one. */
static bool await_device(Replay *replay, uint32_t thread, int32_t device)
{
    for (uint32_t stream = 0; stream < replay->first_own; stream++)
        if (replay->clock.device_of.items[stream] == (uint32_t)device)
            stream_wait(&replay->clock, replay->first_own + thread, stream);
    return await_own_stream(replay, thread);
}

static bool await_stream(Replay *replay, uint32_t thread, const TraceRow *row)
{
    stream_wait(&replay->clock, replay->first_own + thread, *stream_of(replay, row->device, row->stream));
    return await_own_stream(replay, thread);
}

/* --- events ------------------------------------------------------------------------------------------------------- */

/* An event holds what its stream waits for, or runs. */
static void record_event(Replay *replay, const TraceRow *row)
{
    Clock *clock = &replay->clock;
    int64_t version = order_version(&replay->order, row->version), first = replay->recorded.count;
    stream_pending(clock, *stream_of(replay, row->device, row->stream), &replay->recorded);
    replay->first_recorded[version] = first;
    replay->end_recorded[version] = replay->recorded.count;
    for (int64_t place = first; place < replay->recorded.count; place++)
        PUSH(replay->recorded_rows, clock->operations.items[replay->recorded.items[place].place].record);
}

/* Later work of a stream begins after an event. An event from before the trace has happened. */
static void await_event(Replay *replay, uint32_t stream, int64_t number)
{
    int64_t version = order_version(&replay->order, number);
    if (version < 0)
        return;
    int64_t first = replay->first_recorded[version];
    stream_await(&replay->clock, stream, replay->recorded.items + first, replay->end_recorded[version] - first);
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

/* Allocates; if the device gave cached memory back, the thread waits until it is idle. */
static bool allocates(Replay *replay, uint32_t thread, const TraceRow *row)
{
    int32_t stream = (int32_t)*stream_of(replay, row->device, row->stream);
    return blocks_alloc(replay->blocks, row, stream) && await_device(replay, thread, row->device);
}

/* Does what a row says; says whether the thread pauses. */
static bool run_row(Replay *replay, uint32_t thread, uint32_t number)
{
    const TraceRow *row = &replay->input->rows[number];
    if (row->kind == ROW_sync_event) {
        await_event(replay, replay->first_own + thread, row->version);
        return await_own_stream(replay, thread);
    }
    if (row->kind == ROW_node && row->launches)
        return thread_pause(&replay->clock, thread, replay->clock.now + host_takes(&replay->clock, row->launches));
    /* Memory of the host costs nothing. */
    if (row->device < 0)
        return false;
    switch (row->kind) {
    case ROW_kernel:
    case ROW_copy: return issue(replay, thread, number);
    case ROW_update: return replay->input->launch_ns && issue(replay, thread, number);
    case ROW_record: record_event(replay, row); return false;
    case ROW_wait: await_event(replay, *stream_of(replay, row->device, row->stream), row->version); return false;
    case ROW_sync_stream: return await_stream(replay, thread, row);
    case ROW_sync_device: return await_device(replay, thread, row->device);
    case ROW_alloc: return allocates(replay, thread, row);
    case ROW_free:
        if (!replay->order.missing[number])
            blocks_release(replay->blocks, row->block);
        return false;
    case ROW_full: blocks_told(replay->blocks); return false;
    case ROW_record_stream:
        blocks_use(replay->blocks, row->block, (int32_t)*stream_of(replay, row->device, row->stream));
        return false;
    default: return false;
    }
}

/* One thing that a thread does; says whether it pauses. */
bool row_step(Clock *clock, uint32_t thread)
{
    Replay *replay = (Replay *)clock;
    Thread *own = &clock->threads[thread];
    if (own->state == ISSUED) {
        own->state = ARRIVES;
        leave_row(replay, thread);
    }
    if (own->next == NO_ROW && !next_strand(replay, thread))
        return sleeps(replay, thread);
    uint32_t row = (uint32_t)own->next;
    if (replay->order.missing[row] && replay->input->rows[row].kind != ROW_free)
        return sleeps(replay, thread);
    own->state = ISSUED;
    replay->turn[row] = ++replay->turns;
    clock->records.items[row].issue = clock->now;
    return run_row(replay, thread, row);
}
