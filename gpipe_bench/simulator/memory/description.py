"""A workload as one row of integers, which ``description.c`` reads: bytes and lifetimes of all that takes memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.timeline import KINDS
from gpipe_bench.simulator.memory.lowering import lowered_loss, lowered_task, record
from gpipe_bench.simulator.workloads.workload import NOTHING, MemoryOp, SplitWork, StaticMemory, TaskWork, Workload

_TOTAL: Final = 2**60
"""Sums of times and bytes are below this: of 64 bits some are left for losses, copies and updates."""


TASK_KINDS: Final = {
    kind: number for number, kind in enumerate((*KINDS, "collect", "loss", "microbatch_loss", "update", "begin"))
}
"""Kinds of tasks by their numbers in ``memory.h``. Those that run on no stream: the calling thread takes what a forward
pass gave; the loss of the batch, or of a micro-batch, is about to run; optimizers have updated; a step begins."""


@dataclass(frozen=True, slots=True)
class Streams:
    """Where partitions are.

    Attributes:
        count: devices.
        devices: of each partition.
        device_of: of each stream.
        computing: the compute stream of each partition.
    """

    count: int
    devices: Sequence[int]
    device_of: Sequence[int]
    computing: Sequence[int]


def describe(
    workload: Workload,
    places: Streams,
    *,
    capacity: int,
    riding: bool,
    published: bool = False,
    scheduled: bool = False,
) -> array[int]:
    """The description of a run: records in the order of the structs in ``state.h``.

    Args:
        workload: sizes, as :meth:`Workload.chosen` gives them.
        places: devices and streams.
        capacity: bytes of each device; 0 for no limit.
        riding: whether skips ride through the partitions between.
        published: whether gradients are set to zero between steps, rather than given up, and checkpoints keep what
            their recomputation gave out.
        scheduled: whether a schedule runs all passes: then each task sums up its gradients by itself, and keeps
            gradients that come to it until it has run, unless they are handed over.
    """
    sizes = {size: number for number, size in enumerate(workload.partitions[0])}
    places_of_tasks = [(j, size) for j in range(workload.n) for size in sizes]
    tasks = [workload.partitions[j][size] for j, size in places_of_tasks]
    scratch = dict.fromkeys(op.block for work in tasks for op in _requests(work) if op.kind == "scratch")
    kernels = {block: number for number, block in enumerate(scratch)}
    names = _names(workload, tasks)
    inputs = zip(*(workload.task(i, 0).input_bytes for i in range(workload.m)), strict=True)
    found = record(
        (published, scheduled, riding, bool(workload.static), places.count, capacity, names, len(kernels), len(sizes)),
        places.device_of,
        [sizes[size] for size in workload.microbatch_sizes],
        # Micro-batches are views of the tensors of the batch.
        [sum(nbytes) for nbytes in inputs],
        range(len(tasks)),
    )
    skips = [
        record((skip.source, skip.target, skip.returns), [skip.bytes.get(size, 0) for size in sizes])
        for skip in workload.skips
    ]
    partitions = [_partition(workload, places, j, riding=riding) for j in range(workload.n)]
    kinds = [
        lowered_task(work, kernels, hands_over=workload.needing_gradients(*place) == 1)
        for place, work in zip(places_of_tasks, tasks, strict=True)
    ]
    losses = [lowered_loss(workload, abs(size), len(workload.partitions[-1][size].output_bytes)) for size in sizes]
    losses.append(lowered_loss(workload, sum(map(abs, workload.microbatch_sizes)), 1))
    for records in (skips, partitions, kinds, losses):
        found += (len(records), *chain.from_iterable(records))
    return array("q", found)


def check_sizes(workload: Workload, steps: int) -> None:
    """Check that the clock and the memory, which count with 64 bits, can add up all times and bytes of a run.

    Args:
        workload: as :meth:`Workload.chosen` gives it.
        steps: of training.

    Raises:
        ConfigError: they cannot.
    """
    tasks = (work for works in workload.partitions for work in works.values())
    total = workload.m * steps * sum(map(_amount, tasks))
    if total >= _TOTAL:
        rule = f"bytes and nanoseconds of a simulation must add up to less than {_TOTAL:.1e}"
        raise ConfigError([f"{rule}, got {total:.1e}; use a smaller batch, fewer steps or a smaller model"])


def _amount(work: TaskWork) -> int:
    halves = work.split or SplitWork(NOTHING, NOTHING)
    passes = work.forward, work.recompute, work.backward, halves.inputs, halves.weights
    own = sum(work.input_bytes) + sum(work.output_bytes) + sum(kernels.duration_ns for kernels in passes)
    return own + sum(op.bytes for op in _requests(work))


def _requests(work: TaskWork) -> Iterator[MemoryOp]:
    halves = work.split or SplitWork(NOTHING, NOTHING)
    rows = work.forward_memory, work.graph_memory, work.backward_memory, halves.inputs_memory, halves.weights_memory
    return chain.from_iterable(rows)


def _names(workload: Workload, tasks: Iterable[TaskWork]) -> int:
    """How many names a task may have for its inputs and incoming gradients."""
    lengths = [len(row) for work in tasks for row in (work.input_bytes, work.output_bytes)]
    least = min(op.block for work in tasks for op in (MemoryOp("free", -1), *_requests(work)))
    return max(2 * (max(lengths) + len(workload.skips)) + 2, -1 - least)


def _partition(workload: Workload, places: Streams, j: int, *, riding: bool) -> list[int]:
    """Where a partition is, the skips that come and go there, and what stays there between tasks."""
    static = StaticMemory()
    if workload.static:
        static = workload.static[j]
    elif workload.static_bytes and workload.static_bytes[j]:
        static = StaticMemory(resident=(workload.static_bytes[j],))
    neighbours = zip(places.devices[:j], workload.static, strict=False)
    shared = max((len(one.workspaces) for device, one in neighbours if device == places.devices[j]), default=0)
    crossing = {number: skip for number, skip in enumerate(workload.skips) if skip.source != skip.target}
    ending = [number for number, skip in crossing.items() if skip.target == j]
    through = [number for number, skip in crossing.items() if riding and skip.source < j < skip.target]
    departing = [number for number, skip in crossing.items() if skip.giver == j]
    awaited = [number for number, skip in crossing.items() if skip.source == j]
    return record(
        (places.devices[j], places.computing[j], static.gradients, len(ending)),
        ending + through,
        departing,
        awaited,
        static.resident + static.workspaces[shared:],
        static.state,
        static.temporary,
    )
