/* A model of PyTorch's autograd engine: which node runs next, in which thread, at which moment of the host.

   Each device has a thread and a queue of ready nodes. Of these the thread runs the one with the highest re-entrant
   depth, then the one with the highest sequence number (Engine::thread_main and CompareNodeTaskTime in
   torch/csrc/autograd/engine.cpp). A node is ready when all its consumers have run.

       current     a node is queued on the device of its outputs (pytorch#135633); a nested backward pass stays on its
                   device's thread and comes first, so a checkpoint runs as one piece; for every gradient the stream of
                   the node that takes it waits for the stream of the node that gave it (pytorch#151079)
       published   PyTorch 1.3, as torchgpipe used it: the root of a nested backward pass goes to the thread of the CPU,
                   which sleeps. Until it comes back the device's thread runs whatever else is ready; if that is a
                   checkpoint, it nests again: how many do is a race. A pass nested deeper comes first, and one that is
                   not the innermost cannot return, so checkpoints end last in, first out, and their copies wait. Only
                   Wait and copies order streams. There is no Join before a Copy: the Copy itself releases the Fork */

#include "clock.h"

/* What an autograd thread does when it goes on. */
enum {
    CHOOSE,   /* ends a nested pass that has run, else runs the first ready node, else sleeps */
    PASS_ON,  /* its node has run */
    BACKWARD, /* its checkpoint is filled */
    NEST,     /* the same, where the backward pass is a nested one */
    NESTED,   /* the nested pass is prepared */
    RAN       /* the nested pass has run */
};

/* How many threads there are: of each device one, without streams one for all, and that of the CPU. */
uint32_t autograd_threads(const Clock *clock) {
    return clock->input->has_streams ? (uint32_t)clock->input->devices + 1 : 2;
}

void autograd_start(Clock *clock) {
    Autograd *autograd = &clock->autograd;
    autograd->count = autograd_threads(clock);
    autograd->frames.unused = -1;
    autograd->queues = zeros(autograd->count, sizeof(Queue));
    for (uint32_t place = 0; place < autograd->count; place++)
        autograd->queues[place].idle = true;
}

void autograd_free(Clock *clock) {
    Autograd *autograd = &clock->autograd;
    for (uint32_t place = 0; place < autograd->count; place++) {
        free(autograd->queues[place].ready.items);
        free(autograd->queues[place].frames.items);
    }
    free(autograd->queues);
    free(autograd->frames.items);
}

/* --- ready queues ------------------------------------------------------------------------------------------------- */

/* Whether one node runs before another of the same queue. */
static inline bool outranks(const Ready *one, const Ready *other) {
    if (one->depth != other->depth)
        return one->depth > other->depth;
    return one->rank != other->rank ? one->rank > other->rank : one->entry < other->entry;
}

static void queue_add(Queue *queue, Ready added) {
    GROW(queue->ready);
    Ready *items = queue->ready.items;
    int64_t place = queue->ready.count++;
    for (; place && outranks(&added, &items[(place - 1) / 2]); place = (place - 1) / 2)
        items[place] = items[(place - 1) / 2];
    items[place] = added;
}

static Ready queue_next(Queue *queue) {
    Ready *items = queue->ready.items, first = items[0], last = items[--queue->ready.count];
    int64_t count = queue->ready.count, place = 0;
    for (int64_t below = 1; below < count; below = 2 * place + 1) {
        if (below + 1 < count && outranks(&items[below + 1], &items[below]))
            below++;
        if (!outranks(&items[below], &last))
            break;
        items[place] = items[below];
        place = below;
    }
    items[place] = last;
    return first;
}

/* Queues a node whose gradients have arrived, and wakes its thread. */
static void push(Clock *clock, uint32_t number, uint32_t depth, uint32_t frame) {
    Autograd *autograd = &clock->autograd;
    const Input *input = clock->input;
    const Node *node = &clock->graph.nodes.items[number];
    uint32_t place = input->has_streams ? (uint32_t)input->device_of[node->j] : 0;
    Queue *queue = &autograd->queues[place];
    autograd->alive++;
    queue_add(queue, (Ready){node_rank(clock, node), ++autograd->entries, depth, number, frame});
    if (queue->idle) {
        queue->idle = false;
        thread_resume(clock, autograd->first + place);
    }
}

/* A node has run: passes its gradients on. */
static void pass_on(Clock *clock, uint32_t number) {
    Node *nodes = clock->graph.nodes.items;
    const Node *node = &nodes[number];
    for (uint32_t edge = node->first_edge; edge < nodes[number + 1].first_edge; edge++) {
        uint32_t consumer = clock->graph.edges.items[edge] & ~LANE_BIT;
        bool is_lane = clock->graph.edges.items[edge] & LANE_BIT;
        /* Streams of one partition only: a copy meets the streams of both of its ends by itself. */
        if (!is_lane && !clock->input->published && nodes[consumer].stream != node->stream)
            stream_wait(clock, nodes[consumer].stream, node->stream);
        if (!--nodes[consumer].waiting)
            push(clock, consumer, 0, NONE);
    }
    if (!--clock->autograd.alive)
        thread_resume(clock, 0);
}

void autograd_begin(Clock *clock) {
    push(clock, clock->graph.root, 0, NONE);
}

/* --- nested passes ------------------------------------------------------------------------------------------------ */

/* A nested pass is prepared: its root goes to the thread of the CPU. */
static void nest(Clock *clock, Thread *own) {
    Autograd *autograd = &clock->autograd;
    Queue *queue = &autograd->queues[own->number];
    int32_t place;
    TAKE_PLACE(autograd->frames, checkpoint, place);
    uint32_t made = (uint32_t)place;
    PUSH(queue->frames, made);
    autograd->frames.items[made] = (Frame){own->node, queue->frames.count, false, false};
    Time latency = clock->input->latencies[autograd->latency++ % clock->input->latency_count];
    agenda_add(clock, clock->now + latency, SUBJECT_ROOT, made);
}

/* The thread of the CPU comes to the root of a nested pass. */
void autograd_rooted(Clock *clock, uint32_t frame) {
    Frame *found = &clock->autograd.frames.items[frame];
    found->rooted = true;
    push(clock, found->checkpoint, found->depth, frame);
}

static Frame *innermost(Clock *clock, Queue *queue) {
    return queue->frames.count ? &clock->autograd.frames.items[queue->frames.items[queue->frames.count - 1]] : NULL;
}

static uint32_t end_innermost(Clock *clock, Queue *queue) {
    uint32_t frame = queue->frames.items[--queue->frames.count];
    uint32_t checkpoint = clock->autograd.frames.items[frame].checkpoint;
    LEAVE_PLACE(clock->autograd.frames, checkpoint, (int32_t)frame);
    return checkpoint;
}

/* --- threads ------------------------------------------------------------------------------------------------------ */

static bool run_node(Clock *clock, uint32_t thread, Thread *own) {
    const Input *input = clock->input;
    Node *node = &clock->graph.nodes.items[own->node];
    uint32_t task;
    own->state = PASS_ON;
    switch (node->kind) {
    case NODE_recompute:
        task = clock->graph.tasks[node->i * input->partitions + node->j];
        clock->graph.nodes.items[task].filled = true;
        return host_pass(clock, thread, task, KIND_recompute);
    case NODE_checkpoint:
        own->state = input->published ? NEST : BACKWARD;
        return !node->filled && host_pass(clock, thread, own->node, KIND_recompute);
    case NODE_copy:
    case NODE_portal: return host_transfer(clock, thread, own->node, true);
    case NODE_task: return host_pass(clock, thread, own->node, KIND_backward);
    case NODE_wait:
        if (input->published)
            host_wait(clock, node, true);
        return false;
    case NODE_loss: return host_kernels(clock, thread, node->stream, input->loss_ns, input->loss_launches, 0);
    default: return false;
    }
}

/* Ends a nested pass that has run, else runs the first ready node, else sleeps. */
static bool choose(Clock *clock, uint32_t thread, Thread *own) {
    Queue *queue = &clock->autograd.queues[own->number];
    const Frame *frame = innermost(clock, queue);
    if (frame && frame->finished) {
        pass_on(clock, end_innermost(clock, queue));
        return false;
    }
    /* A pass nested deeper is about to come first: it goes between any two nodes of a pass that is less deep. What the
       thread does of that until then, a few nodes, is left out. */
    if (!queue->ready.count || (queue->ready.items[0].frame != NONE && !frame->rooted)) {
        queue->idle = true;
        return thread_pause(clock, thread, NEVER);
    }
    Ready next = queue_next(queue);
    own->node = next.node;
    own->frame = next.frame;
    if (next.frame == NONE)
        return run_node(clock, thread, own);
    own->state = RAN;
    return host_pass(clock, thread, next.node, KIND_backward);
}

bool autograd_step(Clock *clock, uint32_t thread) {
    Thread *own = &clock->threads[thread];
    switch (own->state) {
    case CHOOSE: break;
    case BACKWARD: own->state = PASS_ON; return host_pass(clock, thread, own->node, KIND_backward);
    case NEST: own->state = NESTED; return thread_pause(clock, thread, clock->now + clock->input->prepare_ns);
    case NESTED: nest(clock, own); break;
    case RAN:
        clock->autograd.frames.items[own->frame].finished = true;
        clock->autograd.alive--;
        break;
    default: pass_on(clock, own->node);
    }
    own->state = CHOOSE;
    return choose(clock, thread, own);
}
