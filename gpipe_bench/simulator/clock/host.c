/* What host threads issue: computations and transfers, with what each costs the host. */

#include "clock.h"

/* The numbers of task (i, j), the columns called WORK. */
const int64_t *host_work(const Clock *clock, uint32_t i, uint32_t j) {
    const Input *input = clock->input;
    return input->works + (input->class_of[i] * input->partitions + j) * WORK_columns;
}

static uint32_t source_of(const Clock *clock, const Node *node) {
    return node->kind == NODE_portal ? (uint32_t)clock->input->skip_source[node->skip] : node->j - 1u;
}

/* The other stream of a copy or wait: that of the sender, or the compute stream. */
uint32_t host_peer(const Clock *clock, const Node *node) {
    return node->kind == NODE_wait ? clock->computing[node->j] : copy_stream(clock, node->i, source_of(clock, node));
}

/* Lets the compute stream wait for the copy of what arrives, or the copy stream for the computation of what leaves; in a
   backward pass the other way round. */
void host_wait(Clock *clock, const Node *node, bool back) {
    uint32_t peer = host_peer(clock, node);
    bool computes = node->arriving != back;
    stream_wait(clock, computes ? peer : node->stream, computes ? node->stream : peer);
}

static int64_t way_of(const Clock *clock, const Node *node, bool back) {
    const Input *input = clock->input;
    int64_t class = input->class_of[node->i];
    if (node->kind == NODE_portal)
        return 2 * (input->classes * input->partitions + class * input->skips + node->skip) + back;
    return 2 * (class * input->partitions + node->j) + back;
}

bool host_returns(const Clock *clock, uint32_t node) {
    return clock->input->way_tensors[way_of(clock, &clock->graph.nodes.items[node], true)] > 0;
}

/* --- time passes -------------------------------------------------------------------------------------------------- */

/* Waits where the launch queue of `room` is full; says whether the thread pauses. */
static bool await_room(Clock *clock, Thread *own, uint32_t thread) {
    Time until;
    uint32_t first;
    if (!stream_room(clock, own->room, &until, &first)) {
        /* Resumed when it starts: the room that it leaves is known then. */
        operation_after_start(clock, first, thread);
        return thread_pause(clock, thread, NEVER);
    }
    own->room = NONE;
    until = until > own->done ? until : own->done;
    return until > clock->now && thread_pause(clock, thread, until);
}

/* The host's time for launches that a thread makes now. With an interpreter lock, it comes after those of all threads
   that have begun before, and it takes another time than alone. */
Time host_takes(Clock *clock, int64_t launches) {
    const Input *input = clock->input;
    Time own = input->launch_ns * launches;
    if (!input->lock_permille || !launches)
        return own;
    bool alone = clock->lock_free <= clock->now;
    Time held = own * input->lock_permille / 1000;
    if (alone)
        clock->lock_free = clock->now + (held < own ? held : own);
    else
        clock->lock_free += held;
    Time waited = clock->lock_free - clock->now;
    return waited > own ? waited : own;
}

/* The host's time for what it issued: its calls, and a wait where the launch queue is full. */
bool host_spends(Clock *clock, uint32_t thread, uint32_t stream, Time host_ns) {
    Thread *own = &clock->threads[thread];
    own->done = clock->now + host_ns;
    /* Even if it is none, other threads may come in between. */
    if (!clock->input->queue_depth)
        return thread_pause(clock, thread, own->done);
    own->room = stream;
    return await_room(clock, own, thread);
}

/* --- issue -------------------------------------------------------------------------------------------------------- */

/* A row for a task; it is known where it starts and where it ends. */
static uint32_t new_record(Clock *clock, uint32_t node, int kind) {
    PUSH(clock->records, (Record){clock->now, UNKNOWN, UNKNOWN, node, (uint32_t)kind});
    return clock->records.count - 1;
}

/* Says that an operation is the first, or the last, of a task. */
void host_mark(Clock *clock, uint32_t operation, uint32_t record, bool begins, bool ends) {
    Operation *marked = &clock->operations.items[operation];
    marked->record = record;
    marked->begins = marked->begins || begins;
    marked->ends = marked->ends || ends;
}

/* When each of the launches of a pass has run, after its start; NULL: evenly. */
static const int64_t *launch_ends(const Clock *clock, const Node *task, int kind, int64_t launches) {
    const Input *input = clock->input;
    int64_t place = (input->class_of[task->i] * input->partitions + task->j) * (KIND_backward_weights + 1) + kind;
    const int64_t *first = input->ends_first + place;
    return first[1] - first[0] == launches ? input->ends + first[0] : NULL;
}

static bool issue_pass(Clock *clock, uint32_t thread, uint32_t node, int kind) {
    const Node *task = &clock->graph.nodes.items[node];
    const int64_t *work = host_work(clock, task->i, task->j) + WORK_each * kind;
    uint32_t stream = clock->computing[task->j], record = new_record(clock, node, kind);
    Time duration = work[WORK_ns];
    int64_t launches = work[WORK_launches];
    if (work[WORK_adding_launches] && !clock->has_gradients[task->j]) {
        /* Gradients that were given up are not there to be added to; autograd goes to each of them nevertheless. */
        clock->has_gradients[task->j] = true;
        duration -= work[WORK_adding_ns];
        launches -= work[WORK_adding_launches];
    }
    Order order = {duration, host_takes(clock, work[WORK_launches]), (uint32_t)launches, {0}, 1, NULL};
    order.engines[0] = (uint32_t)clock->input->device_of[task->j];
    order.launch_ends = launch_ends(clock, task, kind, launches);
    host_mark(clock, stream_issue(clock, &stream, 1, &order), record, true, true);
    return host_spends(clock, thread, stream, order.host_ns);
}

/* From device to device: a barrier of two streams. */
static void issue_direct(Clock *clock, const uint32_t *ends, const uint32_t *devices, int64_t way, uint32_t record,
                         Time host_ns) {
    const Input *input = clock->input;
    uint32_t count = (uint32_t)input->devices, tensors = (uint32_t)input->way_tensors[way];
    Order order = {input->way_ns[way], host_ns, tensors, {0}, 2, NULL};
    order.engines[0] = count + devices[0];
    order.engines[1] = 2 * count + devices[1];
    order_bus(&order, 3 * count, input->way_bus[way]);
    order_bus(&order, 3 * count, input->way_second_bus[way]);
    host_mark(clock, stream_issue(clock, ends, 2, &order), record, true, true);
}

/* Through the host's memory, tensor by tensor, with the barrier that a direct copy has by itself. Of no tensors, one
   operation that takes no time stands for all. */
static void issue_staged(Clock *clock, const uint32_t *ends, const uint32_t *devices, int64_t way, uint32_t record,
                         Time host_ns) {
    const Input *input = clock->input;
    uint32_t count = (uint32_t)input->devices, tensors = (uint32_t)input->way_tensors[way];
    const int64_t *lengths = input->staged_ns + input->way_staged[way];
    Time waited = host_ns - 2 * tensors * input->launch_ns;
    stream_wait(clock, ends[0], ends[1]);
    stream_wait(clock, ends[1], ends[0]);
    for (uint32_t tensor = 0; tensor < (tensors ? tensors : 1); tensor++) {
        Time begun = waited + 2 * tensor * input->launch_ns;
        Order down = {lengths[2 * tensor], begun + input->launch_ns, 1, {count + devices[0]}, 1, NULL};
        Order up = {lengths[2 * tensor + 1], begun + 2 * input->launch_ns, 1, {2 * count + devices[1]}, 1, NULL};
        host_mark(clock, stream_issue(clock, &ends[0], 1, &down), record, !tensor, false);
        stream_wait(clock, ends[1], ends[0]);
        host_mark(clock, stream_issue(clock, &ends[1], 1, &up), record, false, tensor + 1 >= tensors);
    }
}

static bool issue_transfer(Clock *clock, uint32_t thread, uint32_t node, bool back) {
    const Input *input = clock->input;
    const Node *copy = &clock->graph.nodes.items[node];
    uint32_t here = (uint32_t)input->device_of[copy->j], there = (uint32_t)input->device_of[source_of(clock, copy)];
    uint32_t peer = host_peer(clock, copy);
    uint32_t ends[2] = {back ? copy->stream : peer, back ? peer : copy->stream};
    uint32_t devices[2] = {back ? here : there, back ? there : here};
    int64_t way = way_of(clock, copy, back);
    Time host_ns = host_takes(clock, (input->staged ? 2 : 1) * input->way_tensors[way]);
    uint32_t record = new_record(clock, node, (copy->kind == NODE_portal ? KIND_portal : KIND_copy) + back);
    if (input->staged)
        issue_staged(clock, ends, devices, way, record, host_ns);
    else
        issue_direct(clock, ends, devices, way, record, host_ns);
    if (clock->memory)
        memory_transferred(clock->memory);
    return host_spends(clock, thread, ends[0], host_ns);
}

static bool issue_now(Clock *clock, uint32_t thread, uint32_t node, int kind) {
    if (kind >= KIND_copy)
        return issue_transfer(clock, thread, node, (kind - KIND_copy) % 2);
    return issue_pass(clock, thread, node, kind);
}

/* Kernels that belong to no task, after `kept_ns` in which the host keeps its device waiting; says whether the thread
   pauses. */
bool host_kernels(Clock *clock, uint32_t thread, uint32_t stream, Time duration, int64_t launches, Time kept_ns) {
    if (!duration && !launches && !kept_ns)
        return false;
    Order order = {kept_ns + duration, kept_ns + host_takes(clock, launches), (uint32_t)launches, {0}, 1, NULL};
    order.engines[0] = clock->device_of.items[stream];
    stream_issue(clock, &stream, 1, &order);
    return host_spends(clock, thread, stream, order.host_ns);
}

/* --- requests, then issue ----------------------------------------------------------------------------------------- */

/* Notes that a device's memory did not suffice; says whether that is so. Then all is over. */
bool host_requested(Clock *clock, int outcome) {
    clock->full = clock->full || outcome == MEMORY_FULL;
    return outcome == MEMORY_FULL;
}

/* Issues a computation or transfer; if its device gave cached memory back, only when the device is idle. */
static bool issue(Clock *clock, uint32_t thread, uint32_t node, int kind, uint32_t device) {
    Thread *own = &clock->threads[thread];
    if (clock->memory && memory_flushed(clock->memory, (int32_t)device)) {
        VECTOR(uint32_t) streams = {NULL, 0, 0};
        for (uint32_t stream = 0; stream < clock->streams.count; stream++)
            if (clock->device_of.items[stream] == device)
                PUSH(streams, stream);
        Order idle = {0};
        uint32_t operation = stream_issue(clock, streams.items, streams.count, &idle);
        free(streams.items);
        operation_after_start(clock, operation, thread);
        own->pending = node;
        own->pending_kind = (uint8_t)kind;
        return thread_pause(clock, thread, NEVER);
    }
    return issue_now(clock, thread, node, kind);
}

static int request_pass(Clock *clock, const Node *node, int kind) {
    int32_t i = (int32_t)node->i, j = (int32_t)node->j;
    int open = node->single ? FORWARD_TIED : FORWARD_OPEN;
    int closed = clock->input->lists ? FORWARD_CELL : FORWARD_CHECKPOINT;
    switch (kind) {
    case KIND_forward: return memory_forward(clock->memory, i, j, node->kind == NODE_checkpoint ? closed : open);
    case KIND_recompute: return memory_recompute(clock->memory, i, j);
    default: return memory_backward(clock->memory, i, j, kind - KIND_backward);
    }
}

bool host_pass(Clock *clock, uint32_t thread, uint32_t node, int kind) {
    const Node *task = &clock->graph.nodes.items[node];
    if (clock->memory && host_requested(clock, request_pass(clock, task, kind)))
        return true;
    /* Of a backward pass in two parts, one may have nothing to compute. */
    const int64_t *work = host_work(clock, task->i, task->j) + WORK_each * kind;
    if ((kind == KIND_backward_inputs || kind == KIND_backward_weights) && !work[WORK_ns] && !work[WORK_launches])
        return false;
    return issue(clock, thread, node, kind, (uint32_t)clock->input->device_of[task->j]);
}

/* The copy of a node, or the copy of its gradients back; says whether the thread pauses. */
bool host_transfer(Clock *clock, uint32_t thread, uint32_t node, bool back) {
    const Node *copy = &clock->graph.nodes.items[node];
    bool portal = copy->kind == NODE_portal;
    uint32_t source = source_of(clock, copy);
    if (clock->memory) {
        int32_t skip = portal ? copy->skip : -1;
        MemoryTransfer made = {(int32_t)copy->i, (int32_t)source, (int32_t)copy->j, skip, back, 0, 0};
        uint32_t peer = host_peer(clock, copy);
        made.sending = (int32_t)(back ? copy->stream : peer);
        made.receiving = (int32_t)(back ? peer : copy->stream);
        if (host_requested(clock, memory_transfer(clock->memory, &made)))
            return true;
    }
    uint32_t receiver = (uint32_t)clock->input->device_of[back ? source : copy->j];
    return issue(clock, thread, node, (portal ? KIND_portal : KIND_copy) + back, receiver);
}

/* A thread that paused within an issue goes on with it; says whether it pauses again. */
bool host_goes_on(Clock *clock, uint32_t thread) {
    Thread *own = &clock->threads[thread];
    if (own->room != NONE)
        return await_room(clock, own, thread);
    if (own->pending == NONE)
        return false;
    uint32_t node = own->pending;
    own->pending = NONE;
    return issue_now(clock, thread, node, own->pending_kind);
}

/* --- results ------------------------------------------------------------------------------------------------------ */

/* Bytes moved by a copy, or of the results of a forward pass. */
static int64_t bytes_of(const Clock *clock, const Node *node, int kind) {
    if (kind >= KIND_copy)
        return clock->input->way_bytes[way_of(clock, node, (kind - KIND_copy) % 2)];
    bool makes = kind == KIND_forward || kind == KIND_recompute;
    return makes ? host_work(clock, node->i, node->j)[WORK_output_bytes] : 0;
}

/* The partition whose device runs a task, for a copy the one that sends. */
static uint32_t runs_on(const Clock *clock, const Record *record) {
    const Node *node = &clock->graph.nodes.items[record->node];
    bool onwards = record->kind >= KIND_copy && (record->kind - KIND_copy) % 2 == 0;
    return onwards ? source_of(clock, node) : node->j;
}

int32_t host_device(const Clock *clock, const Record *record) {
    return clock->input->device_of[runs_on(clock, record)];
}

/* Writes some tasks: those from `first` to before `last`, in the order of issue. */
void clock_rows(const Clock *clock, int64_t first, int64_t last, TaskRow *rows) {
    for (const Record *record = clock->records.items + first; record < clock->records.items + last; record++, rows++) {
        const Node *node = &clock->graph.nodes.items[record->node];
        bool copies = record->kind >= KIND_copy, back = copies && (record->kind - KIND_copy) % 2;
        uint32_t begin = runs_on(clock, record);
        bool aside = copies && (back ? node->stream : host_peer(clock, node)) != clock->computing[begin];
        *rows = (TaskRow){
            record->issue, record->start, record->end, bytes_of(clock, node, record->kind),
            (int32_t)node->i, (int32_t)node->j, clock->input->device_of[begin], (int8_t)record->kind, aside,
        };
    }
}
