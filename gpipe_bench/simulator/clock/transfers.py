"""Transfers between partitions as arrays: their tensors, bytes, nanoseconds and bus."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress

from gpipe_bench.simulator.workloads.workload import HOST, Machine, SkipWork, TaskWork, Workload

_Sizes = tuple[int, ...]
_Way = tuple[int, int, int, int, int, int]
_NAMES = ("way_tensors", "way_bytes", "way_ns", "way_staged", "way_bus", "way_second_bus")
_NOTHING: _Way = (0, 0, 0, 0, -1, -1)


def transfer_columns(
    workload: Workload,
    machine: Machine,
    devices: Sequence[int],
    rows: Sequence[int],
    riding: Sequence[Sequence[int]],
    *,
    staged: bool,
) -> tuple[dict[str, Sequence[int]], int]:
    """The columns of all transfers, see ``table.h``, and how many buses copies take turns on.

    Args:
        workload: sizes.
        machine: how long copies take.
        devices: of each partition.
        rows: of the schedule, of each partition.
        riding: for each partition the skips that travel to it with their micro-batch.
        staged: whether tensors go through the host's memory.
    """
    buses: dict[tuple[int, int], int] = {}
    lengths = array("q")

    def way(source: int, target: int, sizes: _Sizes) -> _Way:
        if staged:
            first = len(lengths)
            for nbytes in sizes:
                lengths.extend((machine.copy_ns(source, HOST, nbytes), machine.copy_ns(HOST, target, nbytes)))
            if not sizes:
                lengths.extend((0, 0))
            return len(sizes), sum(sizes), 0, first, -1, -1
        shared = [buses.setdefault(bus, len(buses)) for bus in machine.buses(source, target)]
        length = sum(machine.copy_ns(source, target, nbytes) for nbytes in sizes)
        one, other, *_ = *shared, -1, -1
        return len(sizes), sum(sizes), length, 0, one, other

    ways: list[_Way] = []
    for source, target, sizes, returned in _transfers(workload, riding):
        here, there = devices[target], devices[source]
        if source < 0 or (here == there and not (staged and rows[source] != rows[target])):
            ways += (_NOTHING, _NOTHING)
        else:
            ways += (way(there, here, sizes), way(here, there, returned))
    columns: dict[str, Sequence[int]] = dict(zip(_NAMES, zip(*ways, strict=True), strict=True))
    return columns | {"staged_ns": lengths}, len(buses)


def _transfers(workload: Workload, riding: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, _Sizes, _Sizes]]:
    """Source, target, sizes, and sizes of the gradients that come back: of micro-batches, then of portals."""
    for size in dict.fromkeys(workload.microbatch_sizes):
        for j, works in enumerate(workload.partitions):
            work, carried = works[size], [workload.skips[skip] for skip in riding[j]]
            sizes = (*work.input_bytes, *(skip.bytes[size] for skip in carried))
            yield j - 1, j, sizes, _returned(work, carried, sizes)
    for size in dict.fromkeys(workload.microbatch_sizes):
        for skip in workload.skips:
            sizes = (skip.bytes[size],)
            yield skip.source, skip.target, sizes, sizes if skip.returns else ()


def _returned(work: TaskWork, carried: Sequence[SkipWork], sizes: _Sizes) -> _Sizes:
    own = work.returns or (True,) * len(work.input_bytes)
    return tuple(compress(sizes, (*own, *(skip.returns for skip in carried))))
