/* Nodes of autograd and their edges. */

#include "recorder.h"

uint32_t graph_node_new(Recorder *recorder, uint32_t kind, uint32_t i, uint32_t j, uint32_t stream) {
    Graph *graph = recorder->graph;
    assert(graph->nodes.count < 1 << NODE_BITS && recorder->made < INT32_MAX);
    int32_t rank = kind == NODE_task || kind == NODE_checkpoint ? 0 : recorder->made++;
    PUSH(graph->nodes, (Node){.i = i, .j = j, .stream = stream, .kind = kind, .rank = rank,
                              .first_edge = graph->edges.count});
    return graph->nodes.count - 1;
}

void graph_take(Recorder *recorder, uint32_t producer) {
    Graph *graph = recorder->graph;
    const Node *newest = &graph->nodes.items[graph->nodes.count - 1];
    /* All values of the loss differ. */
    for (int64_t edge = newest->first_edge; newest->kind != NODE_loss && edge < graph->edges.count; edge++)
        if (graph->edges.items[edge] == producer)
            return;
    if (producer != NONE)
        PUSH(graph->edges, producer);
}

void graph_take_lane(Recorder *recorder, uint32_t lane) {
    if (lane != NONE)
        PUSH(recorder->graph->edges, lane | LANE_BIT);
}

uint32_t *graph_producer_of(Recorder *recorder, uint32_t i, Skips skips, int32_t one) {
    return &recorder->carried[i * (1 + recorder->input->skips) + (one < 0 ? 0 : 1 + skips.items[one])];
}

void graph_take_flat(Recorder *recorder, uint32_t i, Skips skips) {
    for (int32_t one = -1; one < skips.count; one++)
        graph_take(recorder, *graph_producer_of(recorder, i, skips, one));
}

bool has_graph(Recorder *recorder, uint32_t i, Skips skips) {
    bool found = false;
    for (int32_t one = -1; one < skips.count; one++)
        found = found || *graph_producer_of(recorder, i, skips, one) != NONE;
    return found;
}

void graph_put(Recorder *recorder, uint32_t i, uint32_t node, Skips skips) {
    for (int32_t one = -1; one < skips.count; one++)
        *graph_producer_of(recorder, i, skips, one) = node;
}

uint32_t graph_pass(Recorder *recorder, uint32_t kind, uint32_t i, uint32_t j, uint32_t stream, Skips skips,
                    uint32_t lane) {
    bool passed = has_graph(recorder, i, skips);
    uint32_t node = graph_node_new(recorder, kind, i, j, stream);
    graph_take_flat(recorder, i, skips);
    graph_take_lane(recorder, lane);
    graph_put(recorder, i, passed ? node : NONE, skips);
    return node;
}

/* The graph as it is before a backward pass: every step makes the same one. */
void graph_rewind(Clock *clock) {
    Graph *graph = &clock->graph;
    uint32_t edge = 0;
    for (Node *node = graph->nodes.items; node < graph->nodes.items + graph->nodes.count; node++) {
        node->filled = node->issued = false;
        node->waiting = 0;
        /* Producers come before their consumers. */
        for (; edge < node[1].first_edge; edge++) {
            Node *producer = &graph->nodes.items[graph->edges.items[edge] & ~LANE_BIT];
            assert(producer->waiting < UINT16_MAX);
            producer->waiting++;
        }
    }
}

int64_t node_rank(const Clock *clock, const Node *node) {
    bool of_worker = clock->input->workers && (node->kind == NODE_task || node->kind == NODE_checkpoint);
    return node->rank + (of_worker ? 0 : clock->graph.first_rank);
}

void graph_forget(Clock *clock) {
    free(clock->graph.edges.items);
    free(clock->graph.actions.items);
    free(clock->graph.tasks);
    free(clock->graph.copies);
    free(clock->graph.portals);
}
