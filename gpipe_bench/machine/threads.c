/* Host threads go through their rows. */

#include "state.h"

/* The state of a thread: it comes to a row, issues it when its device is idle, or has issued it. */
enum { ARRIVES, ISSUES, ISSUED };

/* --- strands that are ready ---------------------------------------------------------------------------------------- */

/* Whether one strand runs before another of the same thread. */
static bool outranks(const Replay *replay, uint32_t first, uint32_t second)
{
    const Strand *one = &replay->order.strand[first], *other = &replay->order.strand[second];
    if (one->depth != other->depth)
        return one->depth > other->depth;
    if (one->depth == UINT32_MAX)
        return one->first < other->first;
    return one->rank != other->rank ? one->rank > other->rank : one->entry < other->entry;
}

/* A strand waits for nothing any more: it joins those of its thread, a heap. */
void add_ready(Replay *replay, uint32_t strand)
{
    Strands *ready = &replay->ready[replay->order.strand[strand].thread];
    replay->order.strand[strand].entry = ++replay->entries;
    PUSH(*ready, strand);
    int64_t place = ready->count - 1;
    for (; place && outranks(replay, strand, ready->items[(place - 1) / 2]); place = (place - 1) / 2)
        ready->items[place] = ready->items[(place - 1) / 2];
    ready->items[place] = strand;
}

/* Gives a thread what comes next: what returns from its innermost nested pass, if that has run, else the first of its
   strands that are ready; false: there is none. A pass nested deeper is about to come first: it goes between any two nodes
   of a pass that is less deep. What the thread does of that until then, a few nodes, is left out. */
static bool next_strand(Replay *replay, uint32_t thread)
{
    const HostOrder *order = &replay->order;
    Strands *ready = &replay->ready[thread], *frames = &replay->frames[thread];
    uint32_t innermost = frames->count ? frames->items[frames->count - 1] : NONE;
    if (innermost != NONE && replay->nested[innermost].finished) {
        frames->count--;
        uint32_t row = order->strand[order->versions[innermost].back].first;
        order->missing[row]--;
        replay->clock.threads[thread].next = row;
        return true;
    }
    if (!ready->count)
        return false;
    if (innermost != NONE && !replay->nested[innermost].rooted && order->strand[ready->items[0]].nest != NO_ROW)
        return false;
    replay->clock.threads[thread].next = order->strand[ready->items[0]].first;
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
    uint32_t at = replay->clock.threads[strand->thread].next;
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
    uint32_t row = own->next;
    const Strand *strand = &order->strand[order->strand_of[row]];
    own->next = order->next[row];
    if (own->next == NO_ROW && strand->nest != NO_ROW && replay->input->rows[strand->first].kind == ROW_root)
        replay->nested[order_version(order, replay->input->rows[strand->first].version)].finished = true;
    for (uint32_t place = order->first_later[row]; place != NO_ROW; place = order->later.items[place].next) {
        uint32_t later = order->later.items[place].row;
        if (!--order->missing[later])
            release(replay, later);
    }
}

/* --- nested passes ------------------------------------------------------------------------------------------------ */

/* A nested pass is prepared: its root goes to the thread of the CPU. */
static void nest(Replay *replay, uint32_t thread, const TraceRow *row)
{
    uint32_t version = (uint32_t)order_version(&replay->order, row->version);
    PUSH(replay->frames[thread], version);
    replay->order.strand[replay->order.versions[version].root].depth = replay->frames[thread].count + 1;
    Time latency = replay->input->latencies[replay->latency++ % replay->input->latency_count];
    agenda_add(&replay->clock, replay->clock.now + latency, SUBJECT_ROOT, version);
}

void row_rooted(Clock *clock, uint32_t version)
{
    Replay *replay = (Replay *)clock;
    uint32_t row = replay->order.strand[replay->order.versions[version].root].first;
    replay->nested[version].rooted = true;
    if (!--replay->order.missing[row])
        release(replay, row);
}

/* --- tasks -------------------------------------------------------------------------------------------------------- */

static void issued(const Replay *replay, uint32_t thread, const TraceRow *row)
{
    if (replay->holder && row->task)
        replay->holder->issued(replay->holder->own, &replay->input->tasks[row->task - 1], thread);
}

/* --- operations --------------------------------------------------------------------------------------------------- */

/* Issues a kernel, a copy or a wait for the host; says whether the thread pauses. */
static bool issue(Replay *replay, uint32_t thread, uint32_t number)
{
    const TraceRow *row = &replay->input->rows[number];
    uint32_t devices = (uint32_t)replay->input->devices, device = (uint32_t)row->device, peer = (uint32_t)row->peer;
    Time known = replay->input->duration_ns[number];
    Thread *own = &replay->clock.threads[thread];
    Time launch_ns = replay->clock.costs.launch_ns, host_ns = own->owed + launch_ns * row->launches;
    if (row->kind == ROW_update) {
        host_ns = known;
    } else if (!own->joins) {
        /* Several rows that are issued at once take the interpreter's lock once. */
        int64_t later = row->joined ? row->joined - 1 : 0;
        host_ns = launches_ns(&replay->clock, row->launches + later) - launch_ns * later;
    }
    Order order = {known > 0 ? known : 0, host_ns, (uint32_t)row->launches, {device}, 1, NULL, number};
    if (row->adding_launches && !replay->has_gradients[row->gradients]) {
        /* Gradients that were given up are not there to be added to; autograd goes to each of them nevertheless. */
        replay->has_gradients[row->gradients] = true;
        order.duration -= row->adding_ns;
        order.launches -= (uint32_t)row->adding_launches;
    } else if (row->first_end) {
        order.launch_ends = replay->input->launch_ends + row->first_end - 1;
    }
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
    stream_issue(&replay->clock, streams, count, &order);
    if (row->peer >= 0)
        issued(replay, thread, row);
    own->joins = row->joined;
    own->owed = host_ns;
    if (own->joins)
        return false;
    /* Even where a task has no launches, other threads may come in between. */
    return (row->launches || row->kind == ROW_update || row->task) && thread_busy(&replay->clock, thread, streams[0], host_ns);
}

/* Issues a part of a message; says whether the thread pauses. */
static bool meet(Replay *replay, uint32_t thread, uint32_t number)
{
    const TraceRow *row = &replay->input->rows[number];
    uint32_t devices = (uint32_t)replay->input->devices, stream = *stream_of(replay, row->device, row->stream);
    Time known = replay->input->duration_ns[number], host_ns = launches_ns(&replay->clock, row->launches);
    Order order = {.duration = known > 0 ? known : 0, .host_ns = host_ns};
    if (row->peer >= 0) {
        order.engines[order.engine_count++] = devices + (uint32_t)row->device;
        order.engines[order.engine_count++] = 2 * devices + (uint32_t)row->peer;
        order_bus(&order, 3 * devices, replay->input->bus[number]);
        order_bus(&order, 3 * devices, replay->input->second_bus[number]);
    }
    if (replay->meeting[row->meeting] == NONE) {
        replay->first_of[row->meeting] = number;
        replay->meeting[row->meeting] = stream_meet(&replay->clock, (uint32_t)row->parts, number);
    }
    stream_join(&replay->clock, replay->meeting[row->meeting], stream, &order);
    issued(replay, thread, row);
    return row->launches && thread_busy(&replay->clock, thread, stream, host_ns);
}

/* The thread pauses until what its own stream waits for has run; false: nothing has to. */
static bool await_own_stream(Replay *replay, uint32_t thread)
{
    Clock *clock = &replay->clock;
    uint32_t own = replay->first_own + thread;
    if (!clock->streams.items[own].awaited.count)
        return false;
    Order order = {.record = NONE};
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

/* The thread pauses until all streams of a device are idle, which then begin together what comes later. Always true. */
static bool idles(Replay *replay, uint32_t thread, int32_t device)
{
    Clock *clock = &replay->clock;
    Strands streams = {NULL, 0, 0};
    for (uint32_t stream = 0; stream < replay->first_own; stream++)
        if (clock->device_of.items[stream] == (uint32_t)device)
            PUSH(streams, stream);
    Order order = {.record = NONE};
    operation_after_start(clock, stream_issue(clock, streams.items, streams.count, &order), thread);
    free(streams.items);
    return thread_pause(clock, thread, NEVER);
}

/* Tells the holder of memory of a task when its first row comes; says whether the thread pauses, as a device is full, or
   gave segments back. */
static bool tell(Replay *replay, uint32_t thread, const TraceRow *row)
{
    const Holder *holder = replay->holder;
    if (!holder || !row->task || replay->told[row->task])
        return false;
    replay->told[row->task] = true;
    bool copies = row->peer >= 0;
    int32_t sending = row->device < 0 ? -1 : (int32_t)*stream_of(replay, row->device, row->stream);
    int32_t receiving = copies ? (int32_t)*stream_of(replay, row->peer, row->peer_stream) : -1;
    if (!holder->tell(holder->own, &replay->input->tasks[row->task - 1], sending, receiving, thread)) {
        replay->clock.full = true;
        return true;
    }
    if (row->kind != ROW_kernel && !copies)
        return false;
    int32_t device = copies ? row->peer : row->device;
    return holder->flushed(holder->own, device) && idles(replay, thread, device);
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
    if (row->kind == ROW_task) {
        if (row->peer < 0)
            issued(replay, thread, row);
        return false;
    }
    if (row->kind == ROW_host)
        return thread_pause(&replay->clock, thread, replay->clock.now + replay->input->duration_ns[number]);
    if (row->kind == ROW_nest) {
        nest(replay, thread, row);
        return false;
    }
    if (row->kind == ROW_node && row->launches)
        return thread_pause(&replay->clock, thread, replay->clock.now + launches_ns(&replay->clock, row->launches));
    /* Memory of the host costs nothing. */
    if (row->device < 0)
        return false;
    switch (row->kind) {
    case ROW_kernel:
    case ROW_copy: return issue(replay, thread, number);
    case ROW_meet: return meet(replay, thread, number);
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
    if (own->state == ARRIVES) {
        if (own->next == NO_ROW && !next_strand(replay, thread))
            return sleeps(replay, thread);
        const TraceRow *row = &replay->input->rows[own->next];
        if (replay->order.missing[own->next] && row->kind != ROW_free)
            return sleeps(replay, thread);
        replay->turn[own->next] = ++replay->turns;
        own->state = ISSUES;
        if (tell(replay, thread, row))
            return true;
    }
    own->state = ISSUED;
    clock->records.items[own->next].issue = clock->now;
    return run_row(replay, thread, own->next);
}
