"""The numbers of a workload on a machine as arrays, for :mod:`gpipe_bench.simulator.known_order.wavefront`.

What one partition's compute stream gets in a step, in order; absent ones cost nothing:

    position   0 … m-1   m      m+1        m+2        m+3        …   3m+1
               forward   loss   R(m-1,j)   B(m-1,j)   R(m-2,j)   …   optimizer
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.schedule import checkpoint_stop
from gpipe_bench.simulator.workloads.workload import NOTHING, Kernels, Machine, Workload

__all__ = ["BACKWARD", "FORWARD", "RECOMPUTE", "Integers", "LaunchQueue", "Tables"]

Integers = NDArray[np.int64]
FORWARD, RECOMPUTE, BACKWARD = range(3)


class Tables:
    """Durations, launches and copies.

    Args:
        workload: without skips that cross a boundary.
        machine: what copies and launches cost.
        devices: device of each partition.
        checkpoint: the mode.

    Attributes:
        m: micro-batches.
        n: partitions.
        size_of: (m,) index of each micro-batch's size.
        checkpoints: (m,) whether it is checkpointed.
        durations: (kinds, n) nanoseconds on the device.
        launches: (kinds, n) by the host.
        copy: (sizes, n) nanoseconds from partition j-1 to j; 0 for j = 0.
        gradient: (sizes, n) back.
        tensors: (sizes, n) of each copy into partition j.
        kind_of: (positions,) row of ``durations`` for each position of a step.
    """

    def __init__(self, workload: Workload, machine: Machine, devices: Sequence[int], checkpoint: str) -> None:
        self.m, self.n = m, n = workload.m, workload.n
        sizes = sorted(set(workload.microbatch_sizes))
        self.size_of = np.array([sizes.index(size) for size in workload.microbatch_sizes])
        self.checkpoints = np.arange(m) < checkpoint_stop(checkpoint, m)
        works = [[workload.partitions[j][size] for j in range(n)] for size in sizes]
        rows = [[getattr(work, what) for work in row] for what in ("forward", "recompute", "backward") for row in works]
        update = list(workload.optimizer) + [NOTHING] * n
        rows += [[NOTHING] * (n - 1) + [workload.loss], update[:n], [NOTHING] * n]
        self.durations = _array(rows, attrgetter("duration_ns"))
        self.launches = _array(rows, attrgetter("launches"))
        inputs = [[work.input_bytes for work in row] for row in works]
        ways = [(devices[j - 1], devices[j]) for j in range(1, n)]
        copies = _Copies(machine)
        self.copy, self.gradient = (
            np.array(
                [
                    [0, *(copies.length(way[::turn], size) for way, size in zip(ways, row[1:], strict=True))]
                    for row in inputs
                ],
                dtype=np.int64,
            )
            for turn in (1, -1)
        )
        self.tensors = np.array([[0, *(len(size) for size in row[1:])] for row in inputs], dtype=np.int64)
        self._count = len(sizes)
        self.kind_of = self._kinds()

    def steady(self) -> bool:
        """Whether every link either takes time for all copies or for none: only then they pass it in order."""
        return all(bool((((table > 0).all(0)) | ((table == 0).all(0))).all()) for table in (self.copy, self.gradient))

    def plain(self) -> bool:
        """Whether every task and every copy takes time on host and device, and there is more than one micro-batch."""
        tasks = slice(0, 3 * self._count)
        own = (self.durations[tasks], self.launches[tasks])
        copies = (self.copy[:, 1:], self.gradient[:, 1:])
        # Loss and update launch something and take time, or neither.
        others = slice(3 * self._count, None)
        whole = ((self.durations[others] > 0) == (self.launches[others] > 0)).all()
        return self.m > 1 and bool(whole) and all(bool((table > 0).all()) for table in (*own, *copies))

    def kind(self, what: int, sizes: Any) -> Any:
        """Row of ``durations`` for forward (0), recomputation (1) or backward (2) of micro-batches by size index."""
        return what * self._count + sizes

    @property
    def loss(self) -> int:
        """Row of the loss."""
        return 3 * self._count

    @property
    def optimizer(self) -> int:
        """Row of the update."""
        return 3 * self._count + 1

    @property
    def positions(self) -> int:
        """What one stream gets in a step, absent ones included."""
        return 3 * self.m + 2

    def _kinds(self) -> Integers:
        m, absent = self.m, 3 * self._count + 2
        kinds = np.full(self.positions, absent, dtype=np.int64)
        kinds[:m] = self.kind(FORWARD, self.size_of)
        kinds[m] = self.loss
        kinds[m + 1 : 3 * m + 1 : 2] = np.where(self.checkpoints, self.kind(RECOMPUTE, self.size_of), absent)[::-1]
        kinds[m + 2 : 3 * m + 1 : 2] = self.kind(BACKWARD, self.size_of)[::-1]
        kinds[3 * m + 1] = self.optimizer
        return kinds


class LaunchQueue:
    """When the launch queue of a compute stream has room for what was issued last.

    What makes room is known beforehand: a stream's launches come in one order.

    Args:
        tables: of the workload.
        depth: launches that a stream holds.
        steps: training steps.
    """

    def __init__(self, tables: Tables, depth: int, steps: int) -> None:
        self._n = tables.n
        self._durations, self._launches = tables.durations, tables.launches
        self._kind_of = np.tile(tables.kind_of, steps)
        shape = (len(self._kind_of), tables.n)
        self._starts = np.zeros(shape, dtype=np.int64).reshape(-1)
        self._from = np.zeros(shape, dtype=np.int32)
        self._count = np.zeros(shape, dtype=np.int64)
        known: dict[bytes, int] = {}
        for j in range(tables.n):
            column = tables.launches[:, j]
            twin = known.setdefault(column.tobytes(), j)
            if twin == j:
                self._prepare(j, column[self._kind_of], depth)
            else:
                self._from[:, j], self._count[:, j] = self._from[:, twin], self._count[:, twin]
        # Before this position no queue is full.
        self._first = int(np.argmax(self._count.any(axis=1))) if self._count.any() else shape[0]

    def _prepare(self, j: int, launches: Integers, depth: int) -> None:
        total = np.cumsum(launches)
        excess = total - depth
        first = np.searchsorted(total, excess)
        self._from[:, j] = first
        self._count[:, j] = np.where(excess > 0, excess - (total - launches)[first], 0)

    def started(self, positions: Integers, j: Integers, starts: Integers) -> None:
        """Note when operations began."""
        self._starts[positions * self._n + j] = starts

    def room(self, positions: Integers, j: Integers, host: Integers, after: Integers) -> tuple[Integers, Integers]:
        """When hosts go on and their entries, see :mod:`gpipe_bench.simulator.known_order.turns`.

        Args:
            positions: of what was issued.
            j: to which streams.
            host: when.
            after: when they go on if there is room.
        """
        entries = 2 * host
        if positions.max() < self._first:
            return after, entries
        index = positions * self._n + j
        source, count = self._from.reshape(-1)[index], self._count.reshape(-1)[index]
        kinds = self._kind_of[source]
        launches = np.maximum(self._launches[kinds, j], 1)
        passed = -(-self._durations[kinds, j] * count // launches)
        starts = self._starts[source * self._n + j]
        # Whoever waits for a start goes on after it.
        entries = np.where((count > 0) & (starts >= host), 2 * starts + 1, entries)
        return np.maximum(after, np.where(count > 0, starts + passed, 0)), entries


class _Copies:
    """Durations of copies, each asked for once."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}

    def length(self, way: tuple[int, ...], nbytes: tuple[int, ...]) -> int:
        """From the first device of ``way`` to the second."""
        if (way, nbytes) not in self._known:
            source, target = way
            self._known[way, nbytes] = sum(self._machine.copy_ns(source, target, size) for size in nbytes)
        return self._known[way, nbytes]


def _array(rows: list[list[Kernels]], pick: Callable[[Kernels], int]) -> Integers:
    return np.array([[pick(kernels) for kernels in row] for row in rows], dtype=np.int64)
