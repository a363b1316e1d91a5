"""Transfers between partitions as arrays: their tensors, bytes, nanoseconds and bus."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from itertools import compress

from gpipe_bench.simulator.workloads.workload import HOST, Machine, SkipWork, TaskWork, Workload

__all__ = ["Transfers"]


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
        self._work, self._machine, self._devices, self._rows = workload, machine, devices, rows
        self._staged = staged
        self._buses: dict[tuple[int, int], int] = {}
        self._known: dict[tuple[int, int, tuple[int, ...]], tuple[int, int, int, int, int]] = {}
        self._lengths = array("q")
        self._plain = workload.regular
        made = [*self._copies(riding), *self._portals()]
        names = ("way_tensors", "way_bytes", "way_ns", "way_bus", "way_staged")
        self.columns: dict[str, Sequence[int]] = dict(zip(names, zip(*made, strict=True), strict=True))
        self.columns["staged_ns"] = self._lengths
        self.buses = len(self._buses)

    def _copies(self, riding: Sequence[Sequence[int]]) -> Iterator[tuple[int, int, int, int, int]]:
        skips = self._work.skips
        for size in dict.fromkeys(self._work.microbatch_sizes):
            for j, works in enumerate(self._work.partitions):
                work, carried = works[size], [skips[skip] for skip in riding[j]]
                sizes = (*work.input_bytes, *(skip.bytes[size] for skip in carried)) if carried else work.input_bytes
                returned = sizes if self._plain else _returned(work, carried, sizes)
                yield from self._both_ways(j - 1, j, sizes, returned)

    def _portals(self) -> Iterator[tuple[int, int, int, int, int]]:
        for size in dict.fromkeys(self._work.microbatch_sizes):
            for skip in self._work.skips:
                sizes = (skip.bytes[size],)
                yield from self._both_ways(skip.source, skip.target, sizes, sizes if skip.returns else ())

    def _both_ways(
        self, source: int, target: int, sizes: tuple[int, ...], returned: tuple[int, ...]
    ) -> Iterator[tuple[int, int, int, int, int]]:
        here, there = self._devices[target], self._devices[source]
        if source < 0 or (here == there and not (self._staged and self._rows[source] != self._rows[target])):
            # Nothing is copied.
            yield from ((0, 0, 0, -1, 0),) * 2
            return
        yield self._way(there, here, sizes)
        yield self._way(here, there, returned)

    def _way(self, source: int, target: int, sizes: tuple[int, ...]) -> tuple[int, int, int, int, int]:
        key = (source, target, sizes)
        if key not in self._known:
            self._known[key] = self._new_way(*key)
        return self._known[key]

    def _new_way(self, source: int, target: int, sizes: tuple[int, ...]) -> tuple[int, int, int, int, int]:
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


def _returned(work: TaskWork, carried: Sequence[SkipWork], sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Sizes of the gradients that are copied back."""
    own = work.returns or (True,) * len(work.input_bytes)
    return tuple(compress(sizes, (*own, *(skip.returns for skip in carried))))
