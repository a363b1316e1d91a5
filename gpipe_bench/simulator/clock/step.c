/* Training steps: the calling thread and the workers, and the loop that runs everything. */

#include "clock.h"

/* What the calling thread is at. */
enum { BEGIN, FORWARD, COLLECT, LOSS, LISTS, UPDATE };

/* What a worker is at. */
enum { TAKE, ISSUED };

/* --- threads ------------------------------------------------------------------------------------------------------ */

void thread_resume(Clock *clock, uint32_t thread) {
    agenda_add(clock, clock->now, SUBJECT_THREAD, thread);
}

/* A thread pauses until a time, or until somebody resumes it (NEVER). Always true. */
bool thread_pause(Clock *clock, uint32_t thread, Time until) {
    clock->threads[thread].until = until;
    return true;
}

static void submit(Clock *clock, uint32_t node) {
    uint32_t worker = clock->workers[clock->graph.nodes.items[node].j];
    Inbox *inbox = &clock->inboxes[worker];
    PUSH(inbox->nodes, node);
    if (inbox->asleep) {
        inbox->asleep = false;
        thread_resume(clock, 1 + worker);
    }
}

/* A worker: issues the tasks of its inbox, else sleeps. */
static bool worker_step(Clock *clock, uint32_t thread) {
    Thread *own = &clock->threads[thread];
    Inbox *inbox = &clock->inboxes[own->number];
    if (own->state == ISSUED) {
        own->state = TAKE;
        clock->graph.nodes.items[own->node].issued = true;
        if (own->node == clock->collecting) {
            clock->collecting = NONE;
            thread_resume(clock, 0);
        }
        return false;
    }
    if (inbox->first == inbox->nodes.count) {
        inbox->first = inbox->nodes.count = 0;
        inbox->asleep = true;
        return thread_pause(clock, thread, NEVER);
    }
    own->node = inbox->nodes.items[inbox->first++];
    own->state = ISSUED;
    return host_pass(clock, thread, own->node, KIND_forward);
}

/* --- the calling thread ------------------------------------------------------------------------------------------- */

static bool begin_step(Clock *clock, Thread *own) {
    if (clock->step == clock->input->steps)
        return thread_pause(clock, 0, NEVER);
    graph_rewind(clock);
    for (int64_t j = 0; j < clock->input->partitions; j++)
        clock->has_gradients[j] = clock->input->published;
    if (clock->step && clock->memory)
        memory_next_step(clock->memory);
    PUSH(clock->step_records, clock->records.count);
    own->next = 0;
    own->state = clock->input->lists ? LISTS : FORWARD;
    return false;
}

static bool collect(Clock *clock, uint32_t node) {
    const Node *task = &clock->graph.nodes.items[node];
    if (clock->memory)
        memory_collected(clock->memory, (int32_t)task->i, (int32_t)task->j);
    return false;
}

static bool act(Clock *clock, Thread *own) {
    const Graph *graph = &clock->graph;
    if (own->next == graph->actions.count) {
        own->state = LOSS;
        return false;
    }
    uint32_t action = graph->actions.items[own->next++], number = action >> 1;
    const Node *node = &graph->nodes.items[number];
    if (action & 1) {
        if (!clock->input->workers || node->issued)
            return collect(clock, number);
        clock->collecting = own->node = number;
        own->state = COLLECT;
        return thread_pause(clock, 0, NEVER);
    }
    switch (node->kind) {
    case NODE_copy:
    case NODE_portal: return host_transfer(clock, 0, number, false);
    case NODE_wait:
        host_wait(clock, node, false);
        return false;
    default: break;
    }
    if (!clock->input->workers)
        return host_pass(clock, 0, number, KIND_forward);
    submit(clock, number);
    return false;
}

/* The loss, and then the backward pass by autograd. */
static bool loss(Clock *clock, Thread *own) {
    if (clock->memory && host_requested(clock, memory_loss(clock->memory)))
        return true;
    own->state = UPDATE;
    own->sub = 0;
    autograd_begin(clock);
    return thread_pause(clock, 0, NEVER);
}

/* The update of each partition; then the step is over. */
static bool update(Clock *clock, Thread *own) {
    const Input *input = clock->input;
    if (own->sub < input->updates) {
        uint32_t j = own->sub++;
        Time kept_ns = input->update_host_ns[j];
        return host_kernels(clock, 0, clock->computing[j], input->update_ns[j], input->update_launches[j], kept_ns);
    }
    clock->step++;
    own->state = BEGIN;
    return clock->memory && host_requested(clock, memory_update(clock->memory));
}

static bool caller_step(Clock *clock, uint32_t thread) {
    Thread *own = &clock->threads[thread];
    switch (own->state) {
    case BEGIN: return begin_step(clock, own);
    case FORWARD: return act(clock, own);
    case COLLECT: own->state = FORWARD; return collect(clock, own->node);
    case LOSS: return loss(clock, own);
    case LISTS:
        own->state = UPDATE;
        own->sub = 0;
        schedule_begin(clock);
        return thread_pause(clock, thread, NEVER);
    default: return update(clock, own);
    }
}

/* --- the loop ----------------------------------------------------------------------------------------------------- */

static void run_thread(Clock *clock, uint32_t thread) {
    Thread *own = &clock->threads[thread];
    own->until = NEVER;
    bool paused = host_goes_on(clock, thread);
    while (!paused)
        paused = clock->steps[own->role](clock, thread);
    if (own->until != NEVER)
        agenda_add(clock, own->until, SUBJECT_THREAD, thread);
}

void clock_loop(Clock *clock) {
    while (!clock->full) {
        if (clock->ready.count && agenda_over(clock)) {
            engines_settle(clock);
            continue;
        }
        uint32_t next;
        if (!agenda_next(clock, &next))
            return;
        uint32_t number = next & ((1u << SUBJECT_BITS) - 1);
        switch (next >> SUBJECT_BITS) {
        case SUBJECT_OPERATION: operation_ends(clock, number); break;
        case SUBJECT_THREAD: run_thread(clock, number); break;
        default: autograd_rooted(clock, number);
        }
    }
}

/* --- life --------------------------------------------------------------------------------------------------------- */

static void start_threads(Clock *clock) {
    uint32_t n = (uint32_t)clock->input->partitions, devices = autograd_threads(clock);
    uint32_t lists = (uint32_t)clock->input->lists;
    const uint32_t counts[] = {1, n, devices, lists};
    clock->threads = zeros(1 + n + devices + lists, sizeof(Thread));
    Thread *next = clock->threads;
    for (uint8_t role = 0; role < 4; role++)
        for (uint32_t number = 0; number < counts[role]; number++)
            *next++ = (Thread){.role = role, .number = number, .room = NONE, .pending = NONE, .frame = NONE};
    clock->autograd.first = 1 + n;
    clock->schedule.first = 1 + n + devices;
}

/* Makes a clock and records what it is to run; `input` stays the caller's, and must live as long. */
Clock *clock_new(const Input *input) {
    static ThreadStep *const steps[] = {caller_step, worker_step, autograd_step, schedule_step};
    Clock *clock = zeros(1, sizeof(Clock));
    assert(input->devices < NONE / 8 && input->microbatches < NONE / 2);
    clock->input = input;
    clock->steps = steps;
    clock->collecting = NONE;
    streams_start(clock, (uint32_t)(3 * input->devices + input->buses));
    places_start(clock);
    start_threads(clock);
    autograd_start(clock);
    schedule_start(clock);
    clock->inboxes = zeros(input->partitions, sizeof(Inbox));
    clock->has_gradients = zeros(input->partitions, sizeof(bool));
    for (int64_t worker = 0; worker < input->partitions; worker++)
        clock->inboxes[worker].asleep = true;
    record_program(clock);
    return clock;
}

/* Frees what is of no use after a run: all but its tasks. */
static void forget(Clock *clock) {
    for (int64_t worker = 0; worker < clock->input->partitions; worker++)
        free(clock->inboxes[worker].nodes.items);
    free(clock->inboxes);
    free(clock->has_gradients);
    free(clock->threads);
    agenda_free(clock);
    schedule_free(clock);
    autograd_free(clock);
    graph_forget(clock);
    streams_free(clock);
    clock->is_over = true;
}

void clock_free(Clock *clock) {
    if (!clock->is_over)
        forget(clock);
    free(clock->records.items);
    free(clock->step_records.items);
    free(clock->graph.nodes.items);
    places_free(clock);
    free(clock);
}

/* --- results ------------------------------------------------------------------------------------------------------ */

int64_t clock_streams(const Clock *clock) {
    return clock->streams.count;
}

/* Writes the device of each stream, and the compute stream of each partition. */
void clock_places(const Clock *clock, int32_t *device_of, int32_t *computing) {
    for (int64_t stream = 0; stream < clock->streams.count; stream++)
        device_of[stream] = (int32_t)clock->device_of.items[stream];
    for (int64_t j = 0; j < clock->input->partitions; j++)
        computing[j] = (int32_t)clock->computing[j];
}

/* Runs all steps, with a memory or without (NULL); 1 if a device was full, then there is no result. Else `result` has
   the makespan, how many tasks there were, the effort, and when the last task of each step ended. */
int clock_run(Clock *clock, Memory *memory, int64_t *result) {
    if (memory) {
        clock->memory = memory;
        clock->allocators = memory_allocators(memory);
        memory_connect(memory, stream_record, clock);
        clock->full = memory_start(memory) == MEMORY_FULL;
    }
    thread_resume(clock, 0);
    clock_loop(clock);
    if (clock->full)
        return 1;
    *result++ = clock->now;
    *result++ = clock->records.count;
    *result++ = clock->effort;
    PUSH(clock->step_records, clock->records.count);
    Time end = 0;
    for (int64_t step = 0, row = 0; step < clock->input->steps; step++) {
        for (; row < clock->step_records.items[step + 1]; row++)
            end = clock->records.items[row].end > end ? clock->records.items[row].end : end;
        *result++ = end;
    }
    forget(clock);
    return 0;
}
