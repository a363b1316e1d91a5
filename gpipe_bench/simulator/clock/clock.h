/* The clock: streams, engines and host threads in virtual time.

       record.c    the forward program as nodes of autograd's graph, and what the calling thread does, in order
       step.c      the calling thread and the workers; the loop of the agenda
       schedule.c  lists of actions: what a schedule says, with a loss for each micro-batch
       autograd.c  ready queues of nodes, nested passes
            |      these are host threads: they call
       host.c      issues computations and transfers, and passes the time that this takes
            |
       streams.c   operations on streams, launch queues, events
       engines.c   what runs where, when several could
       agenda.c    what happens when, and in which order what happens at one time

   A host thread is a struct with a state. Its function does one thing and says whether the thread pauses; a thread that
   pauses goes on at `until`, or when somebody resumes it. What happens at one time is decided by the order of entry
   into the agenda, as everything here is; nothing depends on addresses or on the host. */

#ifndef CLOCK_H
#define CLOCK_H

#include "streams.h"

#pragma GCC visibility push(hidden)

/* --- places.c ----------------------------------------------------------------------------------------------------- */

void places_start(Clock *clock);
void places_free(Clock *clock);
uint32_t copy_stream(const Clock *clock, uint32_t i, uint32_t j);
uint32_t leaving(const Clock *clock, uint32_t i, uint32_t j);
bool moves(const Clock *clock, uint32_t source, uint32_t target);

/* --- record.c ----------------------------------------------------------------------------------------------------- */

enum { NODE_copy, NODE_portal, NODE_wait, NODE_checkpoint, NODE_task, NODE_join, NODE_recompute, NODE_fork, NODE_loss };

/* An autograd function. Its consumers receive its gradients: `edges` from its first to that of the next node. There are
   several for each task, so no byte is left unused. */
typedef struct {
    uint32_t i;             /* micro-batch */
    uint32_t j : 24;        /* partition, for a copy that where it arrives */
    uint32_t kind : 4;
    bool filled : 1;        /* whether a checkpoint's slot holds a recomputation */
    bool issued : 1;        /* whether a worker has issued a task in this step */
    bool single : 1;        /* whether a task is one node of the engine */
    bool arriving : 1;      /* whether a wait comes before its task */
    uint32_t stream;        /* where its backward is issued */
    uint32_t first_edge;
    int32_t rank;           /* its sequence number in the thread that made it */
    uint16_t skip;          /* the skip of a portal */
    uint16_t waiting;       /* edges into it that no gradient has passed yet */
} Node;

/* Bit of an edge to a Fork whose phony a node takes: no stream waits for it. */
#define LANE_BIT 0x80000000u

/* The graph of a step, and what the calling thread does: a node, doubled, and one more to collect it. */
typedef struct {
    VECTOR(Node) nodes;
    VECTOR(uint32_t) edges;
    VECTOR(uint32_t) actions;
    uint32_t *tasks;        /* by micro-batch and partition */
    uint32_t *copies;       /* the same, or NONE; with lists of actions only */
    uint32_t *portals;      /* by micro-batch and skip, or NONE; with lists of actions only */
    uint32_t root;
    int64_t first_rank;     /* of nodes that the calling thread makes */
} Graph;

void record_program(Clock *clock);
void graph_rewind(Clock *clock);
void graph_forget(Clock *clock);
int64_t node_rank(const Clock *clock, const Node *node);

/* --- host.c ------------------------------------------------------------------------------------------------------- */

enum { ROLE_caller, ROLE_worker, ROLE_autograd, ROLE_list };

typedef struct {
    Time until;       /* of a pause: when it goes on; NEVER: when it is resumed */
    Time done;        /* of a thread that waits for room: when its own calls are over */
    uint32_t room;    /* the stream whose launch queue it waits for, or NONE */
    uint32_t pending; /* the node that it issues when its device is idle, or NONE */
    uint8_t pending_kind;
    uint8_t role, state;
    uint32_t number;  /* of its role */
    uint32_t node;    /* what it is about */
    uint32_t frame;   /* the nested pass that the node belongs to, or NONE */
    uint32_t starter; /* the next thread that waits for the same operation to start, or NONE */
    int64_t next;     /* its next action */
    int64_t stop;     /* the end of its actions */
    uint32_t sub;     /* a place within that, which a state may need */
} Thread;

enum { KIND_BITS = 4, NODE_BITS = 32 - KIND_BITS };

/* A task as a host thread issued it. Large runs have many of them, so no byte is left unused. */
#pragma pack(push, 4)
typedef struct {
    Time issue, start, end;
    uint32_t node : NODE_BITS, kind : KIND_BITS;
} Record;
#pragma pack(pop)

/* A task as Python reads it, see clock/tasks.py. */
typedef struct {
    int64_t issue_ns, start_ns, end_ns, bytes;
    int32_t i, j, device;
    int8_t kind, on_copy_stream;
} TaskRow;

Time host_takes(Clock *clock, int64_t launches);
bool host_spends(Clock *clock, uint32_t thread, uint32_t stream, Time host_ns);
void host_mark(Clock *clock, uint32_t operation, uint32_t record, bool begins, bool ends);
bool host_pass(Clock *clock, uint32_t thread, uint32_t node, int kind);
bool host_transfer(Clock *clock, uint32_t thread, uint32_t node, bool back);
bool host_kernels(Clock *clock, uint32_t thread, uint32_t stream, Time duration, int64_t launches, Time kept_ns);
bool host_goes_on(Clock *clock, uint32_t thread);
int32_t host_device(const Clock *clock, const Record *record);
bool host_returns(const Clock *clock, uint32_t node);
uint32_t host_peer(const Clock *clock, const Node *node);
void host_wait(Clock *clock, const Node *node, bool back);
const int64_t *host_work(const Clock *clock, uint32_t i, uint32_t j);
bool host_requested(Clock *clock, int outcome);

/* --- autograd.c --------------------------------------------------------------------------------------------------- */

/* A nested backward pass on a thread's stack. */
typedef struct {
    uint32_t checkpoint, depth;
    bool rooted;   /* whether its root has come back from the thread of the CPU */
    bool finished;
} Frame;

/* A node that is ready: the deepest first, then the highest rank, then the first to enter. */
typedef struct {
    int64_t rank;
    uint64_t entry;
    uint32_t depth, node, frame;
} Ready;

/* The queue of a device's thread, and its stack of nested passes. */
typedef struct {
    VECTOR(Ready) ready;
    VECTOR(uint32_t) frames;
    bool idle;
} Queue;

typedef struct {
    Queue *queues;
    uint32_t count;      /* the last queue is that of the CPU's thread */
    uint32_t first;      /* of their threads */
    uint64_t entries;
    int64_t alive;       /* nodes queued or running */
    int64_t latency;     /* latencies used so far */
    PLACES(Frame) frames;
} Autograd;

uint32_t autograd_threads(const Clock *clock);
void autograd_start(Clock *clock);
void autograd_free(Clock *clock);
void autograd_begin(Clock *clock);
bool autograd_step(Clock *clock, uint32_t thread);
void autograd_rooted(Clock *clock, uint32_t frame);

/* --- schedule.c --------------------------------------------------------------------------------------------------- */

typedef struct {
    uint16_t *arrived;   /* messages that have come to each task, from the partition before; then gradients */
    uint32_t *waiting;   /* for each partition the thread that waits for some, or NONE */
    int64_t *awaited;    /* and their place in `arrived` */
    uint32_t first;      /* of the threads */
    uint32_t running;
} Schedule;

void schedule_start(Clock *clock);
void schedule_free(Clock *clock);
void schedule_begin(Clock *clock);
bool schedule_step(Clock *clock, uint32_t thread);

/* --- busy.c ------------------------------------------------------------------------------------------------------- */

/* Nanoseconds of a device, see clock/tasks.py. */
typedef struct {
    int64_t compute_ns, recompute_ns, copy_ns, occupied_ns;
} Busy;

/* --- step.c ------------------------------------------------------------------------------------------------------- */

/* What has been handed to a worker and is not done. */
typedef struct {
    VECTOR(uint32_t) nodes;
    int64_t first;
    bool asleep;
} Inbox;

/* What a thread does next; says whether it pauses. */
typedef bool ThreadStep(Clock *clock, uint32_t thread);

struct Clock {
    const Input *input;
    ThreadStep *const *steps; /* by role */
    Memory *memory;           /* or NULL */
    Allocators *allocators;   /* or NULL; they are told of events that pass */
    bool full;      /* whether a device's memory did not suffice: then all is over */
    bool is_over;   /* whether only tasks are left */
    Time now;
    int64_t effort; /* moves in the agenda, operations that streams were found to wait for, attempts to start one */
    Agenda agenda;
    PLACES(Operation) operations;
    uint32_t last_number;
    PLACES(Link) links;
    OperationRefs found;     /* by stream_record */
    VECTOR(Stream) streams;
    VECTOR(uint32_t) device_of;
    Engine *engines;
    uint32_t engine_count;
    Turns ready;
    /* Places: the compute stream of each partition; copy streams by partition and micro-batch, and their pool. */
    uint32_t *computing, *copy_streams, *pool, *pool_taken, *workers;
    Graph graph;
    Thread *threads;
    Autograd autograd;
    Schedule schedule;
    Time lock_free; /* when the threads that have launched so far give the interpreter lock back */
    Inbox *inboxes;
    uint32_t collecting; /* the task that the calling thread waits for, or NONE */
    int64_t step;
    bool *has_gradients; /* of each partition, whether the step has given its parameters some */
    VECTOR(Record) records;
    VECTOR(int64_t) step_records; /* the first record of each step */
};

void clock_loop(Clock *clock);
void thread_resume(Clock *clock, uint32_t thread);
bool thread_pause(Clock *clock, uint32_t thread, Time until);

#pragma GCC visibility pop

/* --- what Python calls -------------------------------------------------------------------------------------------- */

Clock *clock_new(const Input *input);
int64_t clock_streams(const Clock *clock);
void clock_places(const Clock *clock, int32_t *device_of, int32_t *computing);
int clock_run(Clock *clock, Memory *memory, int64_t *result);
void clock_rows(const Clock *clock, int64_t first, int64_t last, TaskRow *rows);
void clock_busy(const Clock *clock, int64_t first, int64_t last, Time start, Time end, Busy *busy);
void clock_free(Clock *clock);

#endif
