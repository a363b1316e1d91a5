/* A forward pass while it is recorded: record.c takes its steps, graph.c makes the nodes. */

#ifndef RECORDER_H
#define RECORDER_H

#include "clock.h"

#pragma GCC visibility push(hidden)

/* What is known while a forward pass is recorded. NONE is a tensor without a graph, or no Fork. */
typedef struct {
    Clock *clock;
    const Input *input;
    Graph *graph;
    uint32_t *carried;  /* producers of each micro-batch and of its skips, of the micro-batch first */
    uint32_t *pending;  /* by micro-batch: a Fork whose phony the task still has to take */
    uint32_t *forks;    /* by partition: the last one, whose phony a Join takes */
    int32_t *counters;  /* nodes made by each worker */
    int32_t made;       /* nodes made by the calling thread */
    bool any_checkpoint;
} Recorder;

/* The skips that a step concerns. */
typedef struct {
    const int32_t *items;
    int32_t count;
} Skips;

/* A new node, without consumers. Those of tasks get their rank later. */
uint32_t graph_node_new(Recorder *recorder, uint32_t kind, uint32_t i, uint32_t j, uint32_t stream);

/* Makes the newest node a consumer of a producer, if it is not one yet. */
void graph_take(Recorder *recorder, uint32_t producer);

/* Makes the newest node the consumer of a Fork's phony, after all else that it takes. */
void graph_take_lane(Recorder *recorder, uint32_t lane);

/* The producer of micro-batch i (-1), or of one of some skips. */
uint32_t *graph_producer_of(Recorder *recorder, uint32_t i, Skips skips, int32_t one);

/* Lets the newest node take a micro-batch and some skips. */
void graph_take_flat(Recorder *recorder, uint32_t i, Skips skips);

bool has_graph(Recorder *recorder, uint32_t i, Skips skips);

/* A micro-batch and some skips come from a node now. */
void graph_put(Recorder *recorder, uint32_t i, uint32_t node, Skips skips);

/* A node through which a micro-batch and some skips go, if they have a graph, and the phony of a Fork. */
uint32_t graph_pass(Recorder *recorder, uint32_t kind, uint32_t i, uint32_t j, uint32_t stream, Skips skips,
                    uint32_t lane);

#pragma GCC visibility pop

#endif
