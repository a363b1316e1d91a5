"""Transfers between partitions as arrays: their tensors, bytes, nanoseconds and bus."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress

from gpipe_bench.simulator.workloads.workload import HOST, Machine, SkipWork, TaskWork, Workload

_Sizes = tuple[int, ...]
_Way = tuple[int, int, int, int, int]
_NAMES = ("way_tensors", "way_bytes", "way_ns", "way_bus", "way_staged")
_NOTHING: _Way = (0, 0, 0, -1, 0)


class Transfers:
    """All transfers of a workload.

    Args:
        workload: sizes.
        machine: how long copies take.
        devices: of each partition.
        rows: of the schedule, of each partition.
        riding: for each partition the skips that travel to it with their micro-batch.
        staged: whether tensors go through the host's memory.

    Attributes:
        columns: see ``table.h``.
        buses: how many buses copies take turns on.
    """

    def __init__(
        self,
        workload: Workload,
        machine: Machine,
        devices: Sequence[int],
        rows: Sequence[int],
        riding: Sequence[Sequence[int]],
        *,
        staged: bool,
    ) -> None:
        self._machine, self._devices, self._rows, self._staged = machine, devices, rows, staged
        self._buses: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int, _Sizes], _Way] = {}
        self._lengths = array("q")
        made = [way for transfer in _transfers(workload, riding) for way in self._both_ways(*transfer)]
        self.columns: dict[str, Sequence[int]] = dict(zip(_NAMES, zip(*made, strict=True), strict=True))
        self.columns["staged_ns"] = self._lengths
        self.buses = len(self._buses)

    def _both_ways(self, source: int, target: int, sizes: _Sizes, returned: _Sizes) -> tuple[_Way, _Way]:
        here, there = self._devices[target], self._devices[source]
        if source < 0 or (here == there and not (self._staged and self._rows[source] != self._rows[target])):
            return _NOTHING, _NOTHING
        return self._way(there, here, sizes), self._way(here, there, returned)

    def _way(self, *way: *tuple[int, int, _Sizes]) -> _Way:
        if way not in self._known:
            self._known[way] = self._new_way(*way)
        return self._known[way]

    def _new_way(self, source: int, target: int, sizes: _Sizes) -> _Way:
        copy_ns, first = self._machine.copy_ns, len(self._lengths)
        if self._staged:
            for nbytes in sizes:
                self._lengths.extend((copy_ns(source, HOST, nbytes), copy_ns(HOST, target, nbytes)))
            if not sizes:
                self._lengths.extend((0, 0))
            return len(sizes), sum(sizes), 0, -1, first
        bus = self._machine.bus(source, target)
        number = -1 if bus is None else self._buses.setdefault(bus, len(self._buses))
        return len(sizes), sum(sizes), sum(copy_ns(source, target, nbytes) for nbytes in sizes), number, 0


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
