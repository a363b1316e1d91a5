/* What Python and C both name: this one table is a struct and enumerations in C, and is read by clock/shared.py.

   NUMBER(name)         a number of the input
   COLUMN(type, name)   an array of the input
   STEP(name)           a step of the forward program that a task may have, see gpipe_bench/schedules/program.py
   ACTION(name)         an action of a schedule, see gpipe_bench/schedules/actions.py
   KIND(name)           a kind of task, see gpipe_bench/results/timeline.py */

#ifndef NUMBER
#define NUMBER(...)
#endif
#ifndef COLUMN
#define COLUMN(...)
#endif
#ifndef STEP
#define STEP(...)
#endif
#ifndef ACTION
#define ACTION(...)
#endif
#ifndef KIND
#define KIND(...)
#endif

/* Sizes. */
NUMBER(microbatches)
NUMBER(partitions)
NUMBER(devices)
NUMBER(classes)            /* of micro-batches whose tasks are alike */
NUMBER(skips)
NUMBER(buses)
NUMBER(steps)              /* of training */
NUMBER(lists)              /* of actions, each of a thread; 0: the forward program, then autograd */
NUMBER(clock_cycle)        /* of the forward program */
NUMBER(latency_count)
NUMBER(updates)            /* partitions with an optimizer */

/* The machine. */
NUMBER(launch_ns)
NUMBER(lock_permille)      /* host time of a launch where several threads launch, of `launch_ns`; 0: no lock */
NUMBER(queue_depth)
NUMBER(loss_ns)
NUMBER(loss_launches)

/* Settings. */
NUMBER(copy_streams)
NUMBER(has_streams)
NUMBER(staged)             /* transfers go through the host's memory */
NUMBER(workers)            /* tasks, and lists of actions, have threads of their own */
NUMBER(portals)
NUMBER(published)          /* the flavour of autograd */
NUMBER(prepare_ns)
NUMBER(ahead)              /* leading micro-batches that are recomputed ahead of their gradients, by lists */

/* Partitions: devices, rows of the schedule, and skips that come in and go out (first of each, and one more). */
COLUMN(int32_t, device_of)
COLUMN(int32_t, row_of)
COLUMN(int32_t, incoming_first)
COLUMN(int32_t, incoming)
COLUMN(int32_t, outgoing_first)
COLUMN(int32_t, outgoing)
COLUMN(int64_t, update_ns)
COLUMN(int64_t, update_launches)
COLUMN(int64_t, update_host_ns)

/* Micro-batches: the class of each; the share of the loss of each in nanoseconds. */
COLUMN(int32_t, class_of)
COLUMN(int64_t, microbatch_loss_ns)

/* Tasks by class and partition: for each kind its duration and launches, and of these what adds gradients to those of
   earlier micro-batches; bytes of outputs, nodes, and whether it learns. */
COLUMN(int64_t, works)

/* For each kind of each of these: when launches have run after the start, if that is not even (first of each, and one
   more). */
COLUMN(int64_t, ends_first)
COLUMN(int64_t, ends)

/* Skips. */
COLUMN(int32_t, skip_source)
COLUMN(int32_t, skip_target)

/* Transfers: by class and partition, and after these by class and skip, forward and back. */
COLUMN(int32_t, way_tensors)
COLUMN(int64_t, way_bytes)
COLUMN(int64_t, way_ns)
COLUMN(int32_t, way_bus)        /* or -1 */
COLUMN(int32_t, way_second_bus) /* or -1 */
COLUMN(int32_t, way_staged)     /* first of `staged_ns`: for each tensor the way to the host and the way from it */
COLUMN(int64_t, staged_ns)

/* Forward passes: the sort of each micro-batch; by sort and partition, the steps of a task, a bit each. */
COLUMN(int32_t, sort_of)
COLUMN(int32_t, steps_of)

/* Lists of actions: the first of each and one more; each action. */
COLUMN(int32_t, list_first)
COLUMN(int8_t, action_kind)
COLUMN(int32_t, action_i)
COLUMN(int32_t, action_j)

/* How long roots of nested passes take to come back, one after the other, again and again. */
COLUMN(int64_t, latencies)

STEP(join)
STEP(portal)
STEP(copy)
STEP(await_copy)
STEP(checkpoint)
STEP(await_compute)
STEP(recompute)
STEP(fork)

ACTION(F)
ACTION(R)
ACTION(B)
ACTION(I)
ACTION(W)

KIND(forward)
KIND(recompute)
KIND(backward)
KIND(backward_inputs)
KIND(backward_weights)
KIND(copy)
KIND(copy_grad)
KIND(portal)
KIND(portal_grad)

#undef NUMBER
#undef COLUMN
#undef STEP
#undef ACTION
#undef KIND
