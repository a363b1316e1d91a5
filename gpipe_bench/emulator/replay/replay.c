/* See replay.h. */

#include "replay.h"

#include "../../simulator/clock/clock.h"

/* What a thread is at: a row that it comes to, or one that it has issued. */
enum { ARRIVES, ISSUED };

struct Replay {
    Clock clock; /* first, as threads are given this */
    Input machine;
    const ReplayInput *input;
    HostOrder order;
    BlockTable *blocks;
    int64_t stream_names;   /* of a device, from 0 */
    uint32_t *streams;      /* by device and name; those of the trace, then one of each thread, on which it waits */
    uint32_t first_own;     /* of the threads' streams */
    OperationRefs recorded; /* what ran when events were recorded */
    VECTOR(uint32_t) recorded_rows; /* and whose rows these are */
    int64_t *first_recorded, *end_recorded; /* of each version */
    const Earlier **awaited; /* what each thread waits for, or NULL */
    uint32_t *watchers;      /* how many threads wait for each */
};

/* --- rows that wait for other threads ----------------------------------------------------------------------------- */

/* A thread goes on to its next row; those that wait for this one go on, too. */
static void leave_row(Replay *replay, uint32_t thread)
{
    Thread *own = &replay->clock.threads[thread];
    own->next = replay->order.next[own->next];
    for (uint32_t other = 0; other < replay->order.threads && replay->watchers[thread]; other++) {
        const Earlier *awaited = replay->awaited[other];
        if (awaited && awaited->thread == thread && own->next > awaited->row) {
            replay->awaited[other] = NULL;
            replay->watchers[thread]--;
            thread_resume(&replay->clock, other);
        }
    }
}

/* Whether the row of a thread must wait for another one; then the thread pauses. */
static bool waits_for_row(Replay *replay, uint32_t thread)
{
    const HostOrder *order = &replay->order;
    int64_t row = replay->clock.threads[thread].next;
    for (int64_t place = order->first_earlier[row]; place < order->first_earlier[row + 1]; place++) {
        const Earlier *earlier = &order->earlier.items[place];
        if (replay->clock.threads[earlier->thread].next <= earlier->row) {
            replay->awaited[thread] = earlier;
            replay->watchers[earlier->thread]++;
            return thread_pause(&replay->clock, thread, NEVER);
        }
    }
    return false;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

static uint32_t *stream_of(const Replay *replay, int32_t device, int32_t stream)
{
    return &replay->streams[device * replay->stream_names + stream];
}

/* Issues a kernel or a copy; says whether the thread pauses. */
static bool issue(Replay *replay, uint32_t thread, uint32_t number)
{
    const TraceRow *row = &replay->input->rows[number];
    uint32_t devices = (uint32_t)replay->input->devices, device = (uint32_t)row->device, peer = (uint32_t)row->peer;
    Order order = {replay->input->duration_ns[number], replay->input->launch_ns * row->launches,
                   (uint32_t)row->launches, {device}, 1};
    uint32_t streams[2] = {*stream_of(replay, row->device, row->stream), NONE}, count = 1;
    if (row->kind == ROW_copy) {
        bool arrives = row->name == replay->input->from_host && row->peer < 0;
        order.engines[0] = (arrives ? 2 : 1) * devices + device;
        if (row->peer >= 0) {
            streams[count++] = *stream_of(replay, row->peer, row->peer_stream);
            order.engines[order.engine_count++] = 2 * devices + peer;
        }
        if (replay->input->bus[number] >= 0)
            order.engines[order.engine_count++] = 3 * devices + (uint32_t)replay->input->bus[number];
    }
    host_mark(&replay->clock, stream_issue(&replay->clock, streams, count, &order), number, true, true);
    return row->launches && host_spends(&replay->clock, thread, streams[0], order.host_ns);
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

/* What is issued to a stream from now on begins after an event. One from before the trace has happened. */
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
    int outcome = blocks_alloc(replay->blocks, row->block, stream, row->bytes);
    replay->clock.full = replay->clock.full || outcome == BLOCK_FULL;
    return outcome == BLOCK_FULL || (outcome == BLOCK_FLUSHED && await_device(replay, thread, row->device));
}

/* Does what a row says; says whether the thread pauses. */
static bool run_row(Replay *replay, uint32_t thread, uint32_t number)
{
    const TraceRow *row = &replay->input->rows[number];
    if (row->kind == ROW_sync_event) {
        await_event(replay, replay->first_own + thread, row->version);
        return await_own_stream(replay, thread);
    }
    /* Memory of the host costs nothing. */
    if (row->device < 0)
        return false;
    switch (row->kind) {
    case ROW_kernel:
    case ROW_copy: return issue(replay, thread, number);
    case ROW_record: record_event(replay, row); return false;
    case ROW_wait: await_event(replay, *stream_of(replay, row->device, row->stream), row->version); return false;
    case ROW_sync_stream: return await_stream(replay, thread, row);
    case ROW_sync_device: return await_device(replay, thread, row->device);
    case ROW_alloc: return allocates(replay, thread, row);
    case ROW_free: blocks_release(replay->blocks, row->block); return false;
    case ROW_record_stream:
        blocks_use(replay->blocks, row->block, (int32_t)*stream_of(replay, row->device, row->stream));
        return false;
    default: return false;
    }
}

/* One thing that a thread does; says whether it pauses. */
static bool row_step(Clock *clock, uint32_t thread)
{
    Replay *replay = (Replay *)clock;
    Thread *own = &clock->threads[thread];
    if (own->state == ISSUED) {
        own->state = ARRIVES;
        leave_row(replay, thread);
    }
    if (own->next == replay->input->count)
        return thread_pause(clock, thread, NEVER);
    if (waits_for_row(replay, thread))
        return true;
    own->state = ISSUED;
    clock->records.items[own->next].issue = clock->now;
    return run_row(replay, thread, (uint32_t)own->next);
}

/* --- life --------------------------------------------------------------------------------------------------------- */

/* The stream of a device by its name; a new one gets the next number. */
static void add_stream(Replay *replay, int32_t device, int32_t stream)
{
    uint32_t *found = stream_of(replay, device, stream);
    if (*found == NONE)
        *found = stream_add(&replay->clock, (uint32_t)device);
}

/* Numbers the streams: the default ones of all devices, those of the trace, one of each thread. */
static void add_streams(Replay *replay)
{
    const ReplayInput *input = replay->input;
    int32_t most = 0;
    for (const TraceRow *row = input->rows; row < input->rows + input->count; row++) {
        most = row->stream > most ? row->stream : most;
        most = row->peer_stream > most ? row->peer_stream : most;
    }
    replay->stream_names = most + 1;
    replay->streams = zeros(input->devices * replay->stream_names, sizeof(uint32_t));
    for (int64_t place = 0; place < input->devices * replay->stream_names; place++)
        replay->streams[place] = NONE;
    for (int32_t device = 0; device < input->devices; device++)
        add_stream(replay, device, 0);
    for (const TraceRow *row = input->rows; row < input->rows + input->count; row++) {
        if (row->device >= 0)
            add_stream(replay, row->device, row->stream);
        if (row->kind == ROW_copy && row->peer >= 0)
            add_stream(replay, row->peer, row->peer_stream);
    }
    replay->first_own = (uint32_t)replay->clock.streams.count;
    for (uint32_t thread = 0; thread < replay->order.threads; thread++)
        stream_add(&replay->clock, (uint32_t)input->devices);
}

static void add_threads(Replay *replay)
{
    uint32_t count = replay->order.threads;
    replay->clock.threads = zeros(count, sizeof(Thread));
    replay->awaited = zeros(count, sizeof(Earlier *));
    replay->watchers = zeros(count, sizeof(uint32_t));
    for (uint32_t thread = 0; thread < count; thread++)
        replay->clock.threads[thread] =
            (Thread){.number = thread, .room = NONE, .pending = NONE, .next = replay->order.first[thread]};
}

Replay *replay_new(const ReplayInput *input)
{
    static ThreadStep *const steps[] = {row_step};
    Replay *replay = zeros(1, sizeof(Replay));
    Clock *clock = &replay->clock;
    replay->input = input;
    replay->machine.launch_ns = input->launch_ns;
    replay->machine.queue_depth = input->queue_depth;
    clock->input = &replay->machine;
    clock->steps = steps;
    order_begin(&replay->order, input);
    streams_start(clock, (uint32_t)(3 * input->devices + input->buses));
    add_streams(replay);
    add_threads(replay);
    replay->first_recorded = zeros(replay->order.version_count, sizeof(int64_t));
    replay->end_recorded = zeros(replay->order.version_count, sizeof(int64_t));
    for (int64_t row = 0; row < input->count; row++)
        PUSH(clock->records, (Record){UNKNOWN, UNKNOWN, UNKNOWN, 0, 0});
    int64_t *device_of = zeros(replay->first_own, sizeof(int64_t));
    for (uint32_t stream = 0; stream < replay->first_own; stream++)
        device_of[stream] = clock->device_of.items[stream];
    replay->blocks = blocks_new(input, device_of, (int32_t)replay->first_own, stream_record, clock);
    clock->allocators = blocks_allocators(replay->blocks);
    free(device_of);
    return replay;
}

void replay_free(Replay *replay)
{
    Clock *clock = &replay->clock;
    blocks_end(replay->blocks);
    order_end(&replay->order);
    streams_free(clock);
    void *parts[] = {
        clock->threads, clock->agenda.heap.items, clock->agenda.present.items, clock->records.items, replay->streams,
        replay->recorded.items, replay->recorded_rows.items, replay->first_recorded, replay->end_recorded,
        replay->awaited, replay->watchers,
    };
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++)
        free(parts[part]);
    free(replay);
}

/* --- results ------------------------------------------------------------------------------------------------------ */

/* When an event passed: when its thread recorded it, and what ran then has ended. */
static Time passed(const Replay *replay, int64_t row)
{
    const Record *records = replay->clock.records.items;
    int64_t version = order_version(&replay->order, replay->input->rows[row].version);
    Time time = records[row].issue;
    for (int64_t place = replay->first_recorded[version]; place < replay->end_recorded[version]; place++) {
        Time end = records[replay->recorded_rows.items[place]].end;
        time = end > time ? end : time;
    }
    return time;
}

static void write_times(const Replay *replay, const ReplayTimes *times)
{
    Time last = 0;
    for (int64_t row = 0; row < replay->input->count; row++) {
        const Record *record = &replay->clock.records.items[row];
        Time begin = record->start, end = record->end;
        last = end > last ? end : last;
        if (replay->input->rows[row].kind == ROW_record)
            begin = end = passed(replay, row);
        else if (replay->input->rows[row].kind == ROW_mark)
            begin = end = record->issue > last ? record->issue : last;
        times->begin[row] = begin;
        times->end[row] = end;
        times->host[row] = record->issue;
    }
}

int replay_run(Replay *replay, const ReplayTimes *times)
{
    for (uint32_t thread = 0; thread < replay->order.threads; thread++)
        thread_resume(&replay->clock, thread);
    clock_loop(&replay->clock);
    if (replay->clock.full)
        return REPLAY_FULL;
    int64_t row = 0, awaited;
    if (replay_stuck(replay, &row, &awaited))
        return REPLAY_STUCK;
    write_times(replay, times);
    return REPLAY_DONE;
}

void replay_memory(const Replay *replay, int32_t device, MemoryUse *use)
{
    blocks_count(replay->blocks, device, use);
}

void replay_shortage(const Replay *replay, MemoryShortage *shortage)
{
    blocks_shortage(replay->blocks, shortage);
}

int replay_stuck(const Replay *replay, int64_t *row, int64_t *awaited)
{
    int64_t found = replay->input->count;
    for (uint32_t thread = 0; thread < replay->order.threads; thread++) {
        int64_t next = replay->clock.threads[thread].next;
        if (replay->awaited[thread] && next >= *row && next < found) {
            found = next;
            *awaited = replay->awaited[thread]->row;
        }
    }
    *row = found;
    return found < replay->input->count;
}
