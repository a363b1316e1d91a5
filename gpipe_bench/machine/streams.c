/* Streams and the operations on them.

       stream   runs what was issued to it in order; an operation may belong to several streams, which is the barrier of
                a copy between devices: it begins when all have come to it, and all go on when it ends
       event    passes when all that was pending on a stream has run */

#include "clock.h"

/* --- lists -------------------------------------------------------------------------------------------------------- */

static void append(Clock *clock, List *list, uint32_t subject) {
    int32_t place;
    TAKE_PLACE(clock->links, next, place);
    clock->links.items[place] = (Link){subject, NONE};
    if (list->first == NONE)
        list->first = (uint32_t)place;
    else
        clock->links.items[list->last].next = (uint32_t)place;
    list->last = (uint32_t)place;
}

static uint32_t take_first(Clock *clock, List *list) {
    uint32_t place = list->first;
    list->first = clock->links.items[place].next;
    LEAVE_PLACE(clock->links, next, (int32_t)place);
    return clock->links.items[place].subject;
}

/* --- operations --------------------------------------------------------------------------------------------------- */

static uint32_t operation_new(Clock *clock) {
    int32_t place;
    TAKE_PLACE(clock->operations, queued, place);
    assert(clock->last_number < NONE);
    Operation *made = &clock->operations.items[place];
    made->number = ++clock->last_number;
    made->start = UNKNOWN;
    made->missing = 0;
    made->followers = (List){NONE, NONE};
    made->starter = made->queue = made->passed = NONE;
    return (uint32_t)place;
}

/* An operation waits for nothing but engines. */
static void is_ready(Clock *clock, uint32_t place) {
    const Operation *ready = &clock->operations.items[place];
    uint32_t stream = ready->streams[0], device = clock->device_of.items[stream];
    PUSH(clock->ready, (Turn){clock->now, ready->called, device, stream, ready->number, place});
}

static inline bool runs(const Clock *clock, OperationRef found) {
    return found.place != NONE && clock->operations.items[found.place].number == found.number;
}

static inline bool belongs(const Operation *operation, uint32_t stream) {
    return operation->streams[0] == stream || operation->streams[1] == stream;
}

/* Makes `follower` wait for the end of `leader`, if it does not yet. The follower is the newest operation, so it is the
   last that the leader has. */
static void follow(Clock *clock, uint32_t leader, uint32_t follower) {
    List *followers = &clock->operations.items[leader].followers;
    if (followers->first != NONE && clock->links.items[followers->last].subject == follower)
        return;
    append(clock, followers, follower);
    Operation *first = &clock->operations.items[leader], *second = &clock->operations.items[follower];
    second->missing++;
    if (!belongs(first, second->streams[0]) && !belongs(first, second->streams[1])) {
        first->passed = second->streams[0];
        first->since = second->number;
    }
}

void operation_after_start(Clock *clock, uint32_t operation, uint32_t thread) {
    uint32_t *place = &clock->operations.items[operation].starter;
    while (*place != NONE)
        place = &clock->threads[*place].starter;
    *place = thread;
    clock->threads[thread].starter = NONE;
}

/* --- streams ------------------------------------------------------------------------------------------------------ */

uint32_t stream_add(Clock *clock, uint32_t device) {
    PUSH(clock->streams, (Stream){.queued = {NONE, NONE}});
    PUSH(clock->device_of, device);
    return clock->streams.count - 1;
}

/* What the next operation of a stream waits for. What has ended is dropped. */
static OperationRefs *pending(Clock *clock, Stream *stream) {
    OperationRefs *awaited = &stream->awaited;
    int64_t kept = 0;
    clock->effort += awaited->count;
    for (int64_t place = 0; place < awaited->count; place++)
        if (runs(clock, awaited->items[place]))
            awaited->items[kept++] = awaited->items[place];
    awaited->count = kept;
    return awaited;
}

/* Appends to a list what the next operation of a stream waits for. */
void stream_pending(Clock *clock, uint32_t number, OperationRefs *found) {
    const OperationRefs *awaited = pending(clock, &clock->streams.items[number]);
    for (int64_t place = 0; place < awaited->count; place++)
        PUSH(*found, awaited->items[place]);
}

/* Whether an operation is known to begin after the end of another one. */
static inline bool succeeds(const Clock *clock, OperationRef later, OperationRef earlier) {
    const Operation *one = &clock->operations.items[later.place], *other = &clock->operations.items[earlier.place];
    bool is_shared = belongs(one, other->streams[0]) || belongs(one, other->streams[1]);
    return (is_shared && one->number > other->number) || (belongs(one, other->passed) && one->number >= other->since);
}

/* Adds an operation to a list of those that run. An operation that another one in the list succeeds is left out: lists
   would grow with the number of partitions else. */
static void add(Clock *clock, OperationRefs *awaited, OperationRef added) {
    int64_t kept = 0;
    for (int64_t place = 0; place < awaited->count; place++)
        if (awaited->items[place].number == added.number || succeeds(clock, awaited->items[place], added))
            return;
    for (int64_t place = 0; place < awaited->count; place++)
        if (!succeeds(clock, added, awaited->items[place]))
            awaited->items[kept++] = awaited->items[place];
    awaited->count = kept;
    PUSH(*awaited, added);
}

/* What is issued to `waiter` from now on begins after some operations. They are not in a list of its own. */
void stream_await(Clock *clock, uint32_t waiter, const OperationRef *awaited, int64_t count) {
    OperationRefs *own = pending(clock, &clock->streams.items[waiter]);
    clock->effort += count;
    for (int64_t place = 0; place < count; place++)
        if (runs(clock, awaited[place]))
            add(clock, own, awaited[place]);
}

/* What is issued to `waiter` from now on begins after everything issued to `awaited` so far. */
void stream_wait(Clock *clock, uint32_t waiter, uint32_t awaited) {
    const OperationRefs *source = &clock->streams.items[awaited].awaited;
    if (waiter != awaited)
        stream_await(clock, waiter, source->items, source->count);
}

/* Says how many operations an event waits for: all that are pending on a stream. As a MemoryRecord. */
int32_t stream_record(void *context, int32_t stream, int32_t event) {
    Clock *clock = context;
    OperationRefs *found = &clock->found;
    found->count = 0;
    stream_pending(clock, (uint32_t)stream, found);
    for (int64_t place = 0; place < found->count; place++)
        append(clock, &clock->operations.items[found->items[place].place].followers, (uint32_t)event | EVENT_BIT);
    return (int32_t)found->count;
}

/* --- launch queues ------------------------------------------------------------------------------------------------ */

/* Puts an operation into the launch queue of a stream. Those whose launches leave room for all are of no interest. */
static void queue_launches(Clock *clock, uint32_t number, uint32_t place, const Order *order) {
    Stream *stream = &clock->streams.items[number];
    Operation *items = clock->operations.items, *added = &items[place];
    added->queue = number;
    added->launches = order->launches;
    added->launch_ends = order->launch_ends;
    added->before = stream->launched;
    added->queued = NONE;
    if (stream->queued.first == NONE)
        stream->queued.first = place;
    else
        items[stream->queued.last].queued = place;
    stream->queued.last = place;
    stream->launched += order->launches;
    int64_t excess = stream->launched - clock->costs.queue_depth;
    while (items[stream->queued.first].before + items[stream->queued.first].launches < excess)
        stream->queued.first = items[stream->queued.first].queued;
}

/* An operation that has ended leaves its launch queue. Those before it have ended, too. */
static void leave_queue(Clock *clock, const Operation *ended, uint32_t place) {
    Stream *stream = &clock->streams.items[ended->queue];
    if (stream->queued.first == place)
        stream->queued.first = ended->queued;
}

/* When the launch queue of a stream has room for all that was issued; false: an operation must start to know that. */
bool stream_room(Clock *clock, uint32_t number, Time *until, uint32_t *operation) {
    const Stream *stream = &clock->streams.items[number];
    int64_t depth = clock->costs.queue_depth, excess = stream->launched - depth;
    *until = clock->now;
    if (!depth || excess <= 0 || stream->queued.first == NONE)
        return true;
    const Operation *first = &clock->operations.items[stream->queued.first];
    if (excess <= first->before)
        return true;
    *operation = stream->queued.first;
    if (first->start < 0)
        return false;
    int64_t leaving = excess - first->before, even = (first->duration * leaving + first->launches - 1) / first->launches;
    *until = first->start + (first->launch_ends ? first->launch_ends[leaving - 1] : even);
    return true;
}

/* --- issue -------------------------------------------------------------------------------------------------------- */

/* Issues an operation to a stream, or to several that meet in it; the first is the one that holds its launches. */
uint32_t stream_issue(Clock *clock, const uint32_t *streams, uint32_t count, const Order *order) {
    uint32_t place = operation_new(clock);
    Operation *made = &clock->operations.items[place];
    made->duration = order->duration;
    made->record = order->record;
    made->called = clock->now;
    made->issued = clock->now + order->host_ns;
    made->streams[0] = streams[0];
    made->streams[1] = streams[count > 1];
    made->engine_count = order->engine_count;
    for (uint32_t engine = 0; engine < order->engine_count; engine++)
        made->engines[engine] = order->engines[engine];
    for (uint32_t one = 0; one < count; one++) {
        OperationRefs *awaited = pending(clock, &clock->streams.items[streams[one]]);
        for (int64_t leader = 0; leader < awaited->count; leader++)
            follow(clock, awaited->items[leader].place, place);
        awaited->count = 0;
        PUSH(*awaited, (OperationRef){place, made->number});
    }
    if (clock->costs.queue_depth && order->launches)
        queue_launches(clock, streams[0], place, order);
    if (!made->missing)
        is_ready(clock, place);
    return place;
}

/* Makes an operation that begins when all its parts have come to the heads of their streams; none has joined it yet. */
uint32_t stream_meet(Clock *clock, uint32_t parts, uint32_t record) {
    uint32_t place = operation_new(clock);
    Operation *made = &clock->operations.items[place];
    made->record = record;
    made->duration = made->called = made->issued = 0;
    made->streams[0] = made->streams[1] = NONE;
    made->engine_count = 0;
    made->missing = parts;
    return place;
}

/* Issues a part of such an operation. Operations are numbered as they are made, while other parts join between later ones
   of their streams. So an operation belongs to the stream of its first part only, where numbers ascend. */
void stream_join(Clock *clock, uint32_t place, uint32_t stream, const Order *order) {
    Operation *made = &clock->operations.items[place];
    if (made->streams[0] == NONE)
        made->streams[0] = made->streams[1] = stream;
    OperationRefs *awaited = pending(clock, &clock->streams.items[stream]);
    for (int64_t leader = 0; leader < awaited->count; leader++)
        follow(clock, awaited->items[leader].place, place);
    Time issued = clock->now + order->host_ns;
    made->called = clock->now;
    made->issued = made->issued > issued ? made->issued : issued;
    made->duration = made->duration > order->duration ? made->duration : order->duration;
    for (uint32_t engine = 0; engine < order->engine_count && made->engine_count < ENGINES; engine++)
        made->engines[made->engine_count++] = order->engines[engine];
    awaited->count = 0;
    PUSH(*awaited, (OperationRef){place, made->number});
    if (!--made->missing)
        is_ready(clock, place);
}

/* --- ends --------------------------------------------------------------------------------------------------------- */

/* Ends an operation: what waits for it may be ready, events may pass, and its engines are free. */
void operation_ends(Clock *clock, uint32_t place) {
    Operation *ended = &clock->operations.items[place];
    ended->number = 0;
    if (ended->record != NONE) {
        clock->records.items[ended->record].start = ended->start;
        clock->records.items[ended->record].end = clock->now;
    }
    if (ended->queue != NONE)
        leave_queue(clock, ended, place);
    while (ended->followers.first != NONE) {
        uint32_t subject = take_first(clock, &ended->followers);
        if (subject & EVENT_BIT) {
            event_passed(clock->allocators, (int32_t)(subject & ~EVENT_BIT));
            continue;
        }
        if (!--clock->operations.items[subject].missing)
            is_ready(clock, subject);
    }
    if (ended->duration)
        for (uint32_t engine = 0; engine < ended->engine_count; engine++)
            engine_release(clock, ended->engines[engine]);
    LEAVE_PLACE(clock->operations, queued, (int32_t)place);
}

/* --- life --------------------------------------------------------------------------------------------------------- */

/* Makes the engines and an empty agenda; streams come one by one. */
void streams_start(Clock *clock, uint32_t engines) {
    clock->operations.unused = clock->links.unused = clock->agenda.entered.unused = -1;
    clock->engine_count = engines;
    clock->engines = zeros(engines, sizeof(Engine));
}

void streams_free(Clock *clock) {
    for (int64_t number = 0; number < clock->streams.count; number++)
        free(clock->streams.items[number].awaited.items);
    for (uint32_t engine = 0; engine < clock->engine_count; engine++)
        free(clock->engines[engine].waiting.items);
    free(clock->engines);
    free(clock->streams.items);
    free(clock->device_of.items);
    free(clock->operations.items);
    free(clock->links.items);
    free(clock->found.items);
    free(clock->ready.items);
}
