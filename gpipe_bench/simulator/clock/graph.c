/* What is asked of a graph that record.c has made. */

#include "clock.h"

/* The graph as it is before a backward pass: every step makes the same one. */
void graph_rewind(Clock *clock) {
    Graph *graph = &clock->graph;
    for (int64_t node = 0; node < graph->nodes.count; node++) {
        graph->nodes.items[node].filled = graph->nodes.items[node].issued = false;
        graph->nodes.items[node].waiting = 0;
    }
    for (int64_t edge = 0; edge < graph->edges.count; edge++) {
        Node *producer = &graph->nodes.items[graph->edges.items[edge] & ~LANE_BIT];
        assert(producer->waiting < UINT16_MAX);
        producer->waiting++;
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
