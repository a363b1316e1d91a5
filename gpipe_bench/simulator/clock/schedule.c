/* Lists of actions, each run by a thread: the schedules of gpipe_bench/schedules as gpipe_bench/engine/runtime runs
   them, with a loss for each micro-batch.

       F     until the micro-batch and its skips have come; compute; send what leaves, skips by their portals
       R     compute once more
       B I   of the first micro-batches, `ahead`: compute once more; until gradients have come; recompute if that is
             still to be done; run backward; send gradients and those of skips to where they came from
       W     the gradients of the weights

   No node stands between the tasks, so there is no autograd to model. */

#include "clock.h"

/* Where a thread is within an action. */
enum { ARRIVE, AWAIT, ENTER, BACKWARD, LEAVE, SEND, SEND_BACK };

/* Whose messages: of the partition before, or gradients. */
enum { FORWARD_MESSAGES, GRADIENTS };

void schedule_start(Clock *clock) {
    const Input *input = clock->input;
    Schedule *schedule = &clock->schedule;
    schedule->arrived = zeros(2 * input->microbatches * input->partitions, sizeof *schedule->arrived);
    schedule->waiting = zeros(input->partitions, sizeof *schedule->waiting);
    schedule->awaited = zeros(input->partitions, sizeof *schedule->awaited);
}

void schedule_free(Clock *clock) {
    free(clock->schedule.arrived);
    free(clock->schedule.waiting);
    free(clock->schedule.awaited);
}

void schedule_begin(Clock *clock) {
    const Input *input = clock->input;
    Schedule *schedule = &clock->schedule;
    for (int64_t cell = 0; cell < 2 * input->microbatches * input->partitions; cell++)
        schedule->arrived[cell] = 0;
    for (int64_t j = 0; j < input->partitions; j++)
        schedule->waiting[j] = NONE;
    schedule->running = (uint32_t)input->lists;
    for (uint32_t list = 0; list < input->lists; list++) {
        uint32_t thread = schedule->first + list;
        clock->threads[thread].next = input->list_first[list];
        clock->threads[thread].stop = input->list_first[list + 1];
        clock->threads[thread].state = ARRIVE;
        thread_resume(clock, thread);
    }
}

/* --- messages ----------------------------------------------------------------------------------------------------- */

static int64_t cell_of(const Clock *clock, int way, uint32_t i, uint32_t j) {
    const Input *input = clock->input;
    return (way * input->microbatches + i) * input->partitions + j;
}

static bool complete(const Clock *clock, int way, uint32_t i, uint32_t j) {
    const Input *input = clock->input;
    int32_t skips = input->portals ? input->incoming_first[j + 1] - input->incoming_first[j] : 0;
    int32_t needed = way == GRADIENTS ? 1 : (j > 0) + skips;
    return clock->schedule.arrived[cell_of(clock, way, i, j)] >= needed;
}

/* Waits for all messages to (i, j); says whether the thread pauses. */
static bool await(Clock *clock, uint32_t thread, int way, uint32_t i, uint32_t j) {
    if (complete(clock, way, i, j))
        return false;
    clock->schedule.waiting[j] = thread;
    clock->schedule.awaited[j] = cell_of(clock, way, i, j);
    return thread_pause(clock, thread, NEVER);
}

static void deliver(Clock *clock, int way, uint32_t i, uint32_t j) {
    Schedule *schedule = &clock->schedule;
    schedule->arrived[cell_of(clock, way, i, j)]++;
    uint32_t thread = schedule->waiting[j];
    if (thread != NONE && schedule->awaited[j] == cell_of(clock, way, i, j) && complete(clock, way, i, j)) {
        schedule->waiting[j] = NONE;
        thread_resume(clock, thread);
    }
}

/* --- sending ------------------------------------------------------------------------------------------------------ */

/* The node of a copy to partition j, or of a portal, or NONE. */
static uint32_t carrier(const Clock *clock, uint32_t i, uint32_t j, int32_t skip) {
    const Input *input = clock->input;
    return skip < 0 ? clock->graph.copies[i * input->partitions + j] : clock->graph.portals[i * input->skips + skip];
}

/* Sends what leaves (i, j), one channel after the other: the micro-batch, then the skips that have portals. */
static bool send(Clock *clock, uint32_t thread, Thread *own, uint32_t i, uint32_t j) {
    const Input *input = clock->input;
    const int32_t *skips = input->outgoing + input->outgoing_first[j];
    int32_t count = input->portals ? input->outgoing_first[j + 1] - input->outgoing_first[j] : 0;
    int32_t channel = (int32_t)own->sub / 2 - 1;
    bool is_issued = own->sub++ % 2;
    if (j == input->partitions - 1 || channel == count) {
        own->state = ARRIVE;
        own->next++;
        return false;
    }
    uint32_t target = channel < 0 ? j + 1 : (uint32_t)input->skip_target[skips[channel]];
    uint32_t node = carrier(clock, i, target, channel < 0 ? -1 : skips[channel]);
    if (!is_issued)
        return node != NONE && host_transfer(clock, thread, node, false);
    deliver(clock, FORWARD_MESSAGES, i, target);
    return false;
}

/* Sends the gradients of what came to (i, j) to where it came from. */
static bool send_back(Clock *clock, uint32_t thread, Thread *own, uint32_t i, uint32_t j) {
    const Input *input = clock->input;
    const int32_t *skips = input->incoming + input->incoming_first[j];
    int32_t count = input->portals ? input->incoming_first[j + 1] - input->incoming_first[j] : 0;
    int32_t channel = (int32_t)own->sub++ - 1;
    if (channel == count) {
        own->state = ARRIVE;
        own->next++;
        deliver(clock, GRADIENTS, i, j - 1);
        return false;
    }
    uint32_t node = carrier(clock, i, j, channel < 0 ? -1 : skips[channel]);
    return node != NONE && host_returns(clock, node) && host_transfer(clock, thread, node, true);
}

/* --- actions ------------------------------------------------------------------------------------------------------ */

static bool forward(Clock *clock, uint32_t thread, Thread *own, uint32_t i, uint32_t j) {
    uint32_t copies = copy_stream(clock, i, j), computes = clock->computing[j];
    if (own->state == ARRIVE) {
        if (await(clock, thread, FORWARD_MESSAGES, i, j))
            return true;
        stream_wait(clock, computes, copies);
        own->state = LEAVE;
        return host_pass(clock, thread, own->node, KIND_forward);
    }
    if (own->state == SEND)
        return send(clock, thread, own, i, j);
    stream_wait(clock, copies, computes);
    if (clock->memory)
        memory_collected(clock->memory, (int32_t)i, (int32_t)j);
    own->state = SEND;
    own->sub = 0;
    return false;
}

/* Fills a checkpoint that is not filled yet. */
static bool recompute(Clock *clock, uint32_t thread, uint32_t node) {
    Node *task = &clock->graph.nodes.items[node];
    if (task->kind != NODE_checkpoint || task->filled)
        return false;
    task->filled = true;
    return host_pass(clock, thread, node, KIND_recompute);
}

/* Waits for the gradients of (i, j); those of the last partition come from the loss. */
static bool arrive(Clock *clock, uint32_t thread, Thread *own, uint32_t i, uint32_t j) {
    const Input *input = clock->input;
    if (j < input->partitions - 1) {
        if (await(clock, thread, GRADIENTS, i, j))
            return true;
        own->state = ENTER;
        return false;
    }
    own->state = ENTER;
    if (clock->memory && host_requested(clock, memory_microbatch_loss(clock->memory, (int32_t)i)))
        return true;
    return host_kernels(clock, thread, clock->computing[j], input->microbatch_loss_ns[i], input->loss_launches, 0);
}

/* B or I, which is of `kind`. */
static bool backward(Clock *clock, uint32_t thread, Thread *own, uint32_t i, uint32_t j, int kind) {
    uint32_t copies = copy_stream(clock, i, j), computes = clock->computing[j];
    switch (own->state) {
    case ARRIVE: own->state = AWAIT; return i < clock->input->ahead && recompute(clock, thread, own->node);
    case AWAIT: return arrive(clock, thread, own, i, j);
    case ENTER:
        stream_wait(clock, computes, copies);
        if (!host_work(clock, i, j)[WORK_learns]) {
            own->state = LEAVE;
            return false;
        }
        own->state = BACKWARD;
        return recompute(clock, thread, own->node);
    case BACKWARD: own->state = LEAVE; return host_pass(clock, thread, own->node, kind);
    case LEAVE:
        stream_wait(clock, copies, computes);
        own->state = j ? SEND_BACK : ARRIVE;
        own->next += !j;
        own->sub = 0;
        return false;
    default: return send_back(clock, thread, own, i, j);
    }
}

static bool perform(Clock *clock, uint32_t thread, Thread *own) {
    const Input *input = clock->input;
    uint32_t i = (uint32_t)input->action_i[own->next], j = (uint32_t)input->action_j[own->next];
    own->node = clock->graph.tasks[i * input->partitions + j];
    switch (input->action_kind[own->next]) {
    case ACTION_F: return forward(clock, thread, own, i, j);
    case ACTION_B: return backward(clock, thread, own, i, j, KIND_backward);
    case ACTION_I: return backward(clock, thread, own, i, j, KIND_backward_inputs);
    case ACTION_R: own->next++; return recompute(clock, thread, own->node);
    default: break;
    }
    own->next++;
    return host_work(clock, i, j)[WORK_learns] && host_pass(clock, thread, own->node, KIND_backward_weights);
}

/* One thing that a thread does of its list; the last thread to end its list lets the calling thread go on. Says whether
   the thread pauses. */
bool schedule_step(Clock *clock, uint32_t thread) {
    Thread *own = &clock->threads[thread];
    if (own->next < own->stop)
        return perform(clock, thread, own);
    if (!--clock->schedule.running)
        thread_resume(clock, 0);
    return thread_pause(clock, thread, NEVER);
}
