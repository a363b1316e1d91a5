/* One row of a trace: the interface between the devices, which write rows, and the replay, which reads them. Plain C. */
#pragma once

#include <stdint.h>

typedef struct {
    int64_t bytes;       /* of a copy, an allocation or a free */
    int64_t duration_ns; /* of a kernel; -1: not known */
    int64_t version;     /* of an event (record, wait, sync_event), of a hand-over (signal, await, mark) or of a backward
                            pass (backward, backward_end); else 0 */
    int64_t pass;        /* the innermost backward pass that the row belongs to, or 0 */
    int64_t block;       /* of alloc, free, record_stream; else 0. Blocks are numbered from 1 in the order of allocation */
    int64_t first_read, first_write, end_write; /* places in the array of accesses: reads, then writes of kernels, copies */
    int64_t adding_ns;   /* of `duration_ns`, what adds gradients to those that are there; see `gradients` */
    int64_t first_end;   /* the place, from 1, in the array of launch ends; 0: launches leave their queue evenly */
    int32_t kind, name;        /* name: place in the table of names (an operator, or a kind of copy) */
    int32_t device, stream;    /* -1: the host; stream 0 is the default one, 1..64 the pools */
    int32_t peer, peer_stream; /* of a copy: the other device (-1: the host) and its current stream */
    int32_t thread, launches;  /* host thread in the order first seen; launches of a kernel (0: costs the host nothing); of
                                  a node, whose `peer` is then its device, 1 if it keeps a gradient without a kernel */
    int32_t sums, scratch;     /* whether the row adds gradients up, in the order of their arrival; whether an allocation
                                  is for a kernel that can do without */
    int32_t adding_launches, gradients; /* of `launches`, likewise; of which parameters, from 1: the first row of them that
                                           a thread comes to finds no gradients, and adds to none */
    int32_t task;              /* that the row belongs to, from 1, in the table of tasks; 0: none */
    int32_t joined;            /* its thread issues more at once: 1 and how many launches follow; 0: it does not, and spends
                                  the time of all of them */
    int32_t meeting, parts;    /* of a part of a message: its meeting, numbered from 1, and how many parts that has; else 0 */
} TraceRow;

/* Bytes of a block that a row reads or writes, from the first one on, before the end. */
typedef struct {
    int64_t block, first, end;
} TraceAccess;

enum {
    ROW_kernel,
    ROW_copy,          /* between devices: of the sender */
    ROW_record,        /* an event on a stream */
    ROW_wait,          /* a stream waits for an event */
    ROW_sync_stream,   /* the host waits for a stream, a device, an event */
    ROW_sync_device,
    ROW_sync_event,
    ROW_alloc,
    ROW_free,
    ROW_record_stream, /* a stream uses a block */
    ROW_signal,        /* a host thread hands over; awaits of that version come after it */
    ROW_await,
    ROW_backward,      /* a backward pass; rows that belong to it come after it, and before its end */
    ROW_backward_end,
    ROW_mark,          /* the end of a training step; all rows so far belong to it or to earlier ones */
    ROW_node,          /* the thread begins a node of autograd. `bytes` is its sequence number. It writes one block, its own
                          number, and reads those of the nodes that wait for it */
    ROW_full,          /* the program is told that the device is full */
    ROW_update,        /* the host goes through the parameters of an update, and keeps their device waiting */
    ROW_task,          /* the thread begins a task that is no kernel and no copy between devices, or has issued all of it:
                          of copies through the host, with both ends in the first such row */
    ROW_host,          /* the thread is busy for its duration */
    ROW_nest,          /* a nested pass of PyTorch 1.3 is prepared: its root, a `root` of that version on the same thread,
                          goes to the thread of the CPU, which sleeps, and comes back after the next of the latencies */
    ROW_root,          /* the thread begins the rows of a nested pass */
    ROW_return,        /* the nested pass has run, and is the innermost: the node that began it goes on. Reads and writes
                          as a node */
    ROW_meet           /* a part of a message between processes. All parts of a meeting begin together, when each has come to
                          the head of its stream, and take as long as the longest. `peer`: in the part of a sender, the
                          device that receives, whose link is then busy; else -1 */
};
