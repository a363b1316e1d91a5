/* The forward program written down as a graph of autograd's nodes and what the calling thread does, in order.

   The counterpart of engine/paper/executor.py, step by step: where the engine makes an autograd node, so does this
   file, with the sequence number that it would have; where it makes none, neither does this file.

       x - Join - Copy - Wait - Checkpoint - Wait - Recompute - Fork - y      as in docs/engine.md, "The autograd graph"

   The calling thread makes the nodes between tasks. If workers make those of tasks, each counts from zero, and the
   calling thread from m n, so that its nodes outrank all checkpoints. Else one thread counts them all.

   Which steps are taken gpipe_bench/schedules/program.py says: `steps_of` has those of each task. */

#include "recorder.h"

/* The first number of a thread that has made many nodes before. */
#define MANY_NODES ((int64_t)1 << 40)

static Skips skips_of(const int32_t *first, const int32_t *skips, uint32_t j) {
    return (Skips){skips + first[j], first[j + 1] - first[j]};
}

static Skips incoming(const Input *input, uint32_t j) {
    return skips_of(input->incoming_first, input->incoming, j);
}

static Skips outgoing(const Input *input, uint32_t j) {
    return skips_of(input->outgoing_first, input->outgoing, j);
}

/* Skips that travel to partition j in the tuple of their micro-batch. */
static Skips riding(const Input *input, uint32_t j) {
    return input->portals ? (Skips){NULL, 0} : incoming(input, j);
}

static void act(Recorder *recorder, uint32_t node, bool collects) {
    PUSH(recorder->graph->actions, node << 1 | collects);
}

static uint32_t *task_of(Recorder *recorder, uint32_t i, uint32_t j) {
    return &recorder->graph->tasks[i * recorder->input->partitions + j];
}

/* --- steps, see gpipe_bench/schedules/program.py ---------------------------------------------------------------------------- */

/* Of inputs that need no gradient, the task takes the phony. In `published` the Copy does: there is no Join. */
static void step_join(Recorder *recorder, uint32_t i, uint32_t j) {
    Skips skips = riding(recorder->input, j);
    uint32_t phony = recorder->forks[j];
    recorder->forks[j] = NONE;
    if (phony == NONE || recorder->input->published || !has_graph(recorder, i, skips)) {
        recorder->pending[i] = phony;
        return;
    }
    uint32_t stream = j ? copy_stream(recorder->clock, i, j - 1) : recorder->clock->computing[0];
    graph_pass(recorder, NODE_join, i, j ? j - 1 : 0, stream, skips, phony);
}

static void step_portal(Recorder *recorder, uint32_t i, uint32_t j, int32_t skip) {
    uint32_t source = (uint32_t)recorder->input->skip_source[skip];
    if (!moves(recorder->clock, source, j))
        return;
    uint32_t *carried = graph_producer_of(recorder, i, (Skips){&skip, 1}, 0);
    uint32_t node = graph_node_new(recorder, NODE_portal, i, j, copy_stream(recorder->clock, i, j));
    recorder->graph->nodes.items[node].skip = (uint16_t)skip;
    act(recorder, node, false);
    graph_take(recorder, *carried);
    if (*carried != NONE)
        *carried = node;
    if (recorder->input->lists)
        recorder->graph->portals[i * recorder->input->skips + skip] = node;
}

static void step_copy(Recorder *recorder, uint32_t i, uint32_t j) {
    if (!moves(recorder->clock, j - 1, j))
        return;
    Skips skips = riding(recorder->input, j);
    uint32_t lane = NONE;
    if (has_graph(recorder, i, skips)) {
        lane = recorder->pending[i];
        recorder->pending[i] = NONE;
    }
    uint32_t node = graph_pass(recorder, NODE_copy, i, j, copy_stream(recorder->clock, i, j), skips, lane);
    act(recorder, node, false);
    if (recorder->input->lists)
        recorder->graph->copies[i * recorder->input->partitions + j] = node;
}

/* The compute stream waits for the copy of what arrives, or the copy stream for the computation of what leaves. */
static void step_wait(Recorder *recorder, uint32_t i, uint32_t j, Skips skips, bool arriving) {
    uint32_t stream = copy_stream(recorder->clock, i, j);
    if (stream == recorder->clock->computing[j])
        return;
    uint32_t node = graph_pass(recorder, NODE_wait, i, j, stream, skips, NONE);
    recorder->graph->nodes.items[node].arriving = arriving;
    act(recorder, node, false);
}

/* The number of a task's node. Of several, which run as one piece here, it is that in the middle. One node that keeps its
   activations comes before all that are made inside of it. */
static int32_t task_rank(Recorder *recorder, uint32_t i, uint32_t j, bool single, bool checkpoint) {
    const Input *input = recorder->input;
    int64_t inner = checkpoint ? 0 : host_work(recorder->clock, i, j)[WORK_nodes], count = single + inner;
    int32_t *counter = input->workers ? &recorder->counters[recorder->clock->workers[j]] : &recorder->made;
    assert(*counter < INT32_MAX - count);
    *counter += (int32_t)count;
    return single ? *counter - (int32_t)count : *counter - 1 - (int32_t)count / 2;
}

/* Without checkpoint a task is one node all the same, if others of its batch have one. */
static void step_launch(Recorder *recorder, uint32_t i, uint32_t j, bool checkpoint) {
    const Input *input = recorder->input;
    Skips skips = incoming(input, j);
    uint32_t phony = recorder->pending[i], compute = recorder->clock->computing[j], join = NONE;
    recorder->pending[i] = NONE;
    recorder->any_checkpoint = recorder->any_checkpoint || checkpoint;
    bool learns = host_work(recorder->clock, i, j)[WORK_learns];
    bool tied = recorder->any_checkpoint && !input->published && !input->lists;
    bool single = learns && (checkpoint || tied);
    if (phony != NONE && (single || input->published)) {
        join = graph_node_new(recorder, NODE_join, i, j, compute);
        graph_take_lane(recorder, phony);
    }
    uint32_t kind = checkpoint && learns ? NODE_checkpoint : NODE_task;
    uint32_t node = graph_node_new(recorder, kind, i, j, compute);
    recorder->graph->nodes.items[node].rank = task_rank(recorder, i, j, single, checkpoint);
    recorder->graph->nodes.items[node].single = single;
    graph_take_flat(recorder, i, skips);
    graph_take(recorder, join);
    *task_of(recorder, i, j) = node;
    act(recorder, node, false);
}

static void step_collect(Recorder *recorder, uint32_t i, uint32_t j) {
    uint32_t node = *task_of(recorder, i, j);
    bool learns = host_work(recorder->clock, i, j)[WORK_learns];
    graph_put(recorder, i, learns ? node : NONE, outgoing(recorder->input, j));
    act(recorder, node, true);
}

static void step_recompute(Recorder *recorder, uint32_t i, uint32_t j) {
    if (recorder->graph->nodes.items[*task_of(recorder, i, j)].kind != NODE_checkpoint)
        return;
    graph_pass(recorder, NODE_recompute, i, j, leaving(recorder->clock, i, j), outgoing(recorder->input, j), NONE);
}

/* There is none where no gradient will ever pass. */
static void step_fork(Recorder *recorder, uint32_t i, uint32_t j) {
    if (!host_work(recorder->clock, i, j)[WORK_learns])
        return;
    uint32_t stream = leaving(recorder->clock, i, j);
    recorder->forks[j] = graph_pass(recorder, NODE_fork, i, j, stream, outgoing(recorder->input, j), NONE);
}

/* The phases of a cycle. `steps`: those that the program takes for the task, a bit each; in this order. */

static void fence(Recorder *recorder, uint32_t i, uint32_t j, int32_t steps) {
    Skips skips = incoming(recorder->input, j);
    if (steps & 1 << STEP_join)
        step_join(recorder, i, j);
    for (int32_t one = 0; steps & 1 << STEP_portal && one < skips.count; one++)
        step_portal(recorder, i, j, skips.items[one]);
    if (steps & 1 << STEP_copy)
        step_copy(recorder, i, j);
}

static void launch(Recorder *recorder, uint32_t i, uint32_t j, int32_t steps) {
    if (steps & 1 << STEP_await_copy)
        step_wait(recorder, i, j, incoming(recorder->input, j), true);
    step_launch(recorder, i, j, steps & 1 << STEP_checkpoint);
}

static void leave(Recorder *recorder, uint32_t i, uint32_t j, int32_t steps) {
    step_collect(recorder, i, j);
    if (steps & 1 << STEP_await_compute)
        step_wait(recorder, i, j, outgoing(recorder->input, j), false);
    if (steps & 1 << STEP_recompute)
        step_recompute(recorder, i, j);
    if (steps & 1 << STEP_fork)
        step_fork(recorder, i, j);
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static Recorder recorder_new(Clock *clock) {
    const Input *input = clock->input;
    int64_t m = input->microbatches, n = input->partitions, skips = input->skips;
    assert(m * n < NONE / 8 && skips < UINT16_MAX && n < 1 << 24);
    Recorder made = {.clock = clock, .input = input, .graph = &clock->graph};
    made.carried = nones(m * (1 + skips));
    made.pending = nones(m);
    made.forks = nones(n);
    made.counters = zeros(n, sizeof(int32_t));
    clock->graph.tasks = nones(m * n);
    clock->graph.copies = input->lists ? nones(m * n) : NULL;
    clock->graph.portals = input->lists ? nones(m * skips) : NULL;
    clock->graph.first_rank = input->workers ? input->published ? MANY_NODES : m * n : 0;
    return made;
}

static void recorder_free(Recorder *recorder) {
    free(recorder->carried);
    free(recorder->pending);
    free(recorder->forks);
    free(recorder->counters);
}

/* Adds the loss, where the backward pass begins, and the end of the last node's edges. */
static void add_root(Recorder *recorder) {
    const Input *input = recorder->input;
    Graph *graph = recorder->graph;
    uint32_t last = (uint32_t)input->partitions - 1, stream = recorder->clock->computing[last];
    graph->root = graph_node_new(recorder, NODE_loss, 0, last, stream);
    for (int64_t i = 0; i < input->microbatches; i++)
        graph_take_flat(recorder, (uint32_t)i, (Skips){NULL, 0});
    PUSH(graph->nodes, (Node){.first_edge = graph->edges.count});
    graph->nodes.count--;
}

/* Records a forward pass, phase by phase of each cycle. If lists of actions run it, its tasks and copies have no graph
   between them. */
void record_program(Clock *clock) {
    static void (*const phases[])(Recorder *, uint32_t, uint32_t, int32_t) = {fence, launch, leave};
    Recorder recorder = recorder_new(clock);
    const Input *input = clock->input;
    int64_t m = input->microbatches, n = input->partitions;
    /* Without clock-cycles, each task is a cycle. */
    for (int64_t cycle = 0; cycle < (input->clock_cycle ? m + n - 1 : m * n); cycle++)
        for (int phase = 0; phase < (input->lists ? 2 : 3); phase++) {
            int64_t first = cycle < m ? 0 : cycle - m + 1, last = cycle < n ? cycle : n - 1;
            if (!input->clock_cycle)
                first = last = cycle % n;
            for (int64_t j = first; j <= last; j++) {
                int64_t i = input->clock_cycle ? cycle - j : cycle / n;
                phases[phase](&recorder, (uint32_t)i, (uint32_t)j, input->steps_of[input->sort_of[i] * n + j]);
            }
        }
    add_root(&recorder);
    recorder_free(&recorder);
}
