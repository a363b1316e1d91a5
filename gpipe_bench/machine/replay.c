/* The life of a replay, and its results. */

#include "state.h"

/* --- life --------------------------------------------------------------------------------------------------------- */

/* Notes that a trace has a stream; a device of -1 is the host. */
static void note_stream(Replay *replay, int32_t device, int32_t stream)
{
    if (device >= 0)
        *stream_of(replay, device, stream) = 0;
}

/* Numbers the streams by device and name, whatever the order of the rows: the default ones of all devices, those of the
   trace, one of each thread. */
static void add_streams(Replay *replay)
{
    const ReplayInput *input = replay->input;
    int32_t most = 0;
    for (const TraceRow *row = input->rows; row < input->rows + input->count; row++) {
        most = row->stream > most ? row->stream : most;
        most = row->peer_stream > most ? row->peer_stream : most;
    }
    replay->stream_names = most + 1;
    int64_t names = input->devices * replay->stream_names;
    replay->streams = nones(names);
    for (const TraceRow *row = input->rows; row < input->rows + input->count; row++) {
        note_stream(replay, row->device, row->stream);
        note_stream(replay, row->kind == ROW_copy ? row->peer : -1, row->peer_stream);
    }
    for (int32_t device = 0; device < input->devices; device++)
        *stream_of(replay, device, 0) = stream_add(&replay->clock, (uint32_t)device);
    for (int64_t name = 0; name < names; name++)
        if (replay->streams[name] != NONE && name % replay->stream_names)
            replay->streams[name] = stream_add(&replay->clock, (uint32_t)(name / replay->stream_names));
    replay->first_own = replay->clock.streams.count;
    for (uint32_t thread = 0; thread < replay->order.threads; thread++)
        stream_add(&replay->clock, (uint32_t)input->devices);
}

static void add_meetings(Replay *replay)
{
    for (const TraceRow *row = replay->input->rows; row < replay->input->rows + replay->input->count; row++)
        replay->meetings = row->meeting > replay->meetings ? row->meeting : replay->meetings;
    replay->meeting = nones(replay->meetings + 1);
    replay->first_of = nones(replay->meetings + 1);
}

static void add_threads(Replay *replay)
{
    const HostOrder *order = &replay->order;
    replay->clock.threads = zeros(order->threads, sizeof(Thread));
    replay->asleep = zeros(order->threads, sizeof(bool));
    replay->ready = zeros(order->threads, sizeof(Strands));
    replay->frames = zeros(order->threads, sizeof(Strands));
    replay->nested = zeros(order->version_count, sizeof(Nested));
    replay->turn = zeros(replay->input->count, sizeof(int64_t));
    for (uint32_t thread = 0; thread < order->threads; thread++)
        replay->clock.threads[thread] = (Thread){.room = NONE, .next = NO_ROW};
    for (uint32_t strand = 0; strand < order->strands; strand++)
        if (!order->missing[order->strand[strand].first])
            add_ready(replay, strand);
}

Replay *replay_new(const ReplayInput *input)
{
    Replay *replay = zeros(1, sizeof(Replay));
    Clock *clock = &replay->clock;
    replay->input = input;
    clock->costs = (Costs){input->launch_ns, input->lock_permille, input->queue_depth};
    clock->step = row_step;
    clock->rooted = row_rooted;
    order_begin(&replay->order, input);
    streams_start(clock, (uint32_t)(3 * input->devices + input->buses));
    add_streams(replay);
    add_threads(replay);
    add_meetings(replay);
    replay->first_recorded = zeros(replay->order.version_count, sizeof(int64_t));
    replay->end_recorded = zeros(replay->order.version_count, sizeof(int64_t));
    int32_t most = 0;
    for (int64_t row = 0; row < input->count; row++) {
        most = input->rows[row].gradients > most ? input->rows[row].gradients : most;
        PUSH(clock->records, (Record){UNKNOWN, UNKNOWN, UNKNOWN});
    }
    replay->has_gradients = zeros(most + 1, sizeof(bool));
    replay->told = zeros(input->task_count + 1, sizeof(bool));
    int64_t *device_of = zeros(replay->first_own, sizeof(int64_t));
    replay_streams(replay, device_of);
    replay->blocks = blocks_new(input, device_of, (int32_t)replay->first_own, stream_record, clock);
    clock->allocators = blocks_allocators(replay->blocks);
    free(device_of);
    return replay;
}

void replay_free(Replay *replay)
{
    Clock *clock = &replay->clock;
    for (uint32_t thread = 0; thread < replay->order.threads; thread++)
    {
        free(replay->ready[thread].items);
        free(replay->frames[thread].items);
    }
    blocks_end(replay->blocks);
    order_end(&replay->order);
    streams_free(clock);
    agenda_free(clock);
    void *parts[] = {
        clock->threads, clock->records.items, replay->streams, replay->recorded.items, replay->recorded_rows.items,
        replay->first_recorded, replay->end_recorded, replay->asleep, replay->ready, replay->frames, replay->nested,
        replay->has_gradients, replay->told, replay->turn, replay->meeting, replay->first_of,
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
        /* Where a device had to be idle, an operation of no row stands for all before it. */
        uint32_t awaited = replay->recorded_rows.items[place];
        if (awaited != NONE && records[awaited].end > time)
            time = records[awaited].end;
    }
    return time;
}

/* When a row ran; the parts of a message run together. */
static const Record *ran(const Replay *replay, int64_t row)
{
    uint32_t first = replay->first_of[replay->input->rows[row].meeting];
    return &replay->clock.records.items[replay->turn[row] && first != NONE ? first : row];
}

void replay_times(const Replay *replay, const ReplayTimes *times)
{
    Time last = 0;
    for (int64_t row = 0; row < replay->input->count; row++) {
        const Record *record = ran(replay, row);
        Time begin = record->start, end = record->end;
        last = end > last ? end : last;
        if (replay->input->rows[row].kind == ROW_record)
            begin = end = passed(replay, row);
        else if (replay->input->rows[row].kind == ROW_mark)
            begin = end = record->issue > last ? record->issue : last;
        times->begin[row] = begin;
        times->end[row] = end;
        times->host[row] = replay->clock.records.items[row].issue;
        times->turn[row] = replay->turn[row];
    }
}

void replay_tasks(const Replay *replay, const TaskTimes *times)
{
    for (int64_t task = 0; task < replay->input->task_count; task++)
        times->issue[task] = times->start[task] = times->end[task] = times->turn[task] = UNKNOWN;
    for (int64_t row = 0; row < replay->input->count; row++) {
        int64_t task = replay->input->rows[row].task - 1;
        const Record *record = ran(replay, row);
        if (task < 0 || record->start < 0)
            continue;
        if (times->start[task] < 0 || record->start < times->start[task])
            times->start[task] = record->start;
        if (times->turn[task] < 0 || replay->turn[row] < times->turn[task]) {
            times->turn[task] = replay->turn[row];
            times->issue[task] = replay->clock.records.items[row].issue;
        }
        if (record->end > times->end[task])
            times->end[task] = record->end;
    }
}

void replay_ends(const Replay *replay, int64_t *now, int64_t *effort)
{
    *now = replay->clock.now;
    *effort = replay->clock.effort;
}

int32_t replay_stream(const Replay *replay, int32_t device, int32_t stream)
{
    return (int32_t)*stream_of(replay, device, stream);
}

int64_t replay_streams(const Replay *replay, int64_t *device_of)
{
    for (uint32_t stream = 0; device_of && stream < replay->first_own; stream++)
        device_of[stream] = replay->clock.device_of.items[stream];
    return replay->first_own;
}

void replay_hold(Replay *replay, const Holder *holder)
{
    replay->holder = holder;
    replay->clock.allocators = holder->allocators;
}

int replay_run(Replay *replay)
{
    const Holder *holder = replay->holder;
    if (holder && !holder->start(holder->own, stream_record, &replay->clock))
        return REPLAY_FULL;
    for (uint32_t thread = 0; thread < replay->order.threads; thread++)
        thread_resume(&replay->clock, thread);
    clock_loop(&replay->clock);
    if (replay->clock.full)
        return REPLAY_FULL;
    int64_t row = 0, awaited;
    if (replay_stuck(replay, &row, &awaited))
        return REPLAY_STUCK;
    for (int32_t meeting = 1; meeting <= replay->meetings; meeting++)
        if (replay->first_of[meeting] != NONE && replay->clock.records.items[replay->first_of[meeting]].end < 0)
            return REPLAY_APART;
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

/* A row that a row waits for. */
static int64_t awaited_by(const Replay *replay, int64_t row)
{
    const HostOrder *order = &replay->order;
    for (int64_t other = 0; other < replay->input->count; other++)
        for (uint32_t place = order->first_later[other]; place != NO_ROW && !replay->turn[other];
             place = order->later.items[place].next)
            if (order->later.items[place].row == row)
                return other;
    return row;
}

int replay_stuck(const Replay *replay, int64_t *row, int64_t *awaited)
{
    for (; *row < replay->input->count; (*row)++) {
        const Strand *strand = &replay->order.strand[replay->order.strand_of[*row]];
        bool arrived = *row == strand->first || replay->clock.threads[strand->thread].next == *row;
        if (arrived && !replay->turn[*row] && replay->order.missing[*row]) {
            *awaited = awaited_by(replay, *row);
            return true;
        }
    }
    return false;
}
