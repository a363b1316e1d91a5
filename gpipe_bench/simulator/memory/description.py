"""A workload as one row of integers, which ``description.c`` reads: bytes and lifetimes of all that takes memory."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

from gpipe_bench.simulator.memory.lowering import LoweredTask
from gpipe_bench.simulator.workloads.workload import (
    NOTHING,
    MemoryOp,
    SplitWork,
    StaticMemory,
    TaskWork,
    Workload,
)

__all__ = ["VERSION", "Places", "describe"]

VERSION: Final = 1
"""Of the order of the integers; ``description.c`` has the same."""


@dataclass(frozen=True, slots=True)
class Places:
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
    places: Places,
    *,
    capacity: int,
    riding: bool,
    published: bool = False,
    scheduled: bool = False,
) -> array[int]:
    """The description of a run.

    Args:
        workload: sizes, as :meth:`Workload.chosen` gives them.
        places: devices and streams; all copy streams have been handed out.
        capacity: bytes of each device; 0 for no limit.
        riding: whether skips ride through the partitions between.
        published: whether gradients are set to zero between steps, rather than given up, and checkpoints keep what
            their recomputation gave out.
        scheduled: whether the backward pass is scheduled: then each task sums up its gradients by itself, and keeps
            gradients that come to it until it has run, unless they are handed over.
    """
    sizes = {size: number for number, size in enumerate(workload.partitions[0])}
    firsts = _alike(works[size] for works in workload.partitions for size in sizes)
    tasks = list({id(first): first for first in firsts}.values())
    kind_of, kernels = {id(work): kind for kind, work in enumerate(tasks)}, _kernels(tasks)
    found = [VERSION, published, scheduled, riding, bool(workload.static), places.count, capacity]
    found += _listed(places.device_of)
    found += [_names(workload, tasks), len(kernels), len(sizes)]
    found += _listed([sizes[size] for size in workload.microbatch_sizes])
    found += _listed(_batch(workload))
    found += _listed([kind_of[id(first)] for first in firsts])
    found += _skips(workload, list(sizes))
    found.append(workload.n)
    for j in range(workload.n):
        found += _partition(workload, places, j, riding=riding)
    found.append(len(tasks))
    for work in tasks:
        found += LoweredTask(work, kernels).integers()
    return array("q", found)


def _listed(numbers: Sequence[int]) -> Iterator[int]:
    """A list, with its length before it."""
    yield len(numbers)
    yield from numbers


def _alike(works: Iterable[TaskWork]) -> list[TaskWork]:
    """For each task the first one that is equal to it."""
    firsts: dict[object, list[TaskWork]] = {}
    found: list[TaskWork] = []
    for work in works:
        # Most are told apart by these, so that few long lists are compared.
        rows = work.forward_memory, work.graph_memory, work.backward_memory
        candidates = firsts.setdefault((work.backward, work.input_bytes, *map(len, rows)), [])
        first = next((one for one in candidates if one == work), None)
        if first is None:
            first = work
            candidates.append(work)
        found.append(first)
    return found


def _kernels(tasks: Iterable[TaskWork]) -> dict[int, int]:
    """A number for each kind of kernel that asks for scratch memory."""
    kinds = dict.fromkeys(op.block for work in tasks for op in _requests(work) if op.kind == "scratch")
    return {kind: number for number, kind in enumerate(kinds)}


def _requests(work: TaskWork) -> Iterator[MemoryOp]:
    """All requests of a task."""
    halves = work.split or SplitWork(NOTHING, NOTHING)
    rows = work.forward_memory, work.graph_memory, work.backward_memory, halves.inputs_memory, halves.weights_memory
    return chain.from_iterable(rows)


def _names(workload: Workload, tasks: Iterable[TaskWork]) -> int:
    """How many names a task may have for its inputs and incoming gradients."""
    lengths = [len(row) for work in tasks for row in (work.input_bytes, work.output_bytes)]
    least = min(op.block for work in tasks for op in (MemoryOp("free", -1), *_requests(work)))
    return max(2 * (max(lengths) + len(workload.skips)) + 2, -1 - least)


def _batch(workload: Workload) -> list[int]:
    """Bytes of each tensor of the batch, of which micro-batches are views."""
    inputs = zip(*(workload.task(i, 0).input_bytes for i in range(workload.m)), strict=True)
    return [sum(nbytes) for nbytes in inputs]


def _skips(workload: Workload, sizes: Sequence[int]) -> Iterator[int]:
    yield len(workload.skips)
    for skip in workload.skips:
        yield from (skip.source, skip.target, skip.returns)
        yield from _listed([skip.bytes.get(size, 0) for size in sizes])


def _partition(workload: Workload, places: Places, j: int, *, riding: bool) -> Iterator[int]:
    """Where a partition is, the skips that come and go there, and what stays there between tasks."""
    static = StaticMemory()
    if workload.static:
        static = workload.static[j]
    elif workload.static_bytes and workload.static_bytes[j]:
        static = StaticMemory(resident=(workload.static_bytes[j],))
    crossing = {number: skip for number, skip in enumerate(workload.skips) if skip.source != skip.target}
    ending = [number for number, skip in crossing.items() if skip.target == j]
    through = [number for number, skip in crossing.items() if riding and skip.source < j < skip.target]
    yield from (places.devices[j], places.computing[j], static.gradients, static.temporary, len(ending))
    yield from _listed(ending + through)
    yield from _listed([number for number, skip in crossing.items() if skip.source == j])
    yield from _listed(static.resident)
    yield from _listed(static.state)
