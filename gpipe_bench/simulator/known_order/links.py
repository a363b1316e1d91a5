"""Links of pipelines whose order of issue is known, and what goes over them into each task, and back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from gpipe_bench.simulator.workloads.workload import Machine, SkipWork, Workload

__all__ = ["Arrival", "Links"]


class Arrival(NamedTuple):
    """Tensors that come into a task, and their gradients that go back.

    Attributes:
        source: partition that they come from.
        key: of a skip; None for the inputs.
        nbytes: of each.
        kind: of the copy.
        kind_back: of the copy of the gradients.
        there: number of the link, and nanoseconds.
        back: likewise.
    """

    source: int
    key: str | None
    nbytes: tuple[int, ...]
    kind: str
    kind_back: str
    there: tuple[int, int]
    back: tuple[int, int]


class Links:
    """Links between partitions, numbered.

    Args:
        workload: what passes over them.
        machine: on which.
        devices: of each partition.
        in_order: whether copies of links that nothing shares are taken to come in order.

    Attributes:
        crossing: skips that cross a boundary.
        engines: of each link.
        shared: of each link, whether copies of others may be in its way.
        arrivals: by size of the micro-batch and partition, what comes into a task in the order of issue: by portals,
            and its inputs.
        awaits: of each partition, how many copies bring gradients for a task.
    """

    def __init__(self, workload: Workload, machine: Machine, devices: Sequence[int], *, in_order: bool) -> None:
        self._machine, self._devices = machine, devices
        n = workload.n
        self.crossing = [skip for skip in workload.skips if skip.source != skip.target]
        ways = [(j - 1, j) for j in range(1, n)] + [(skip.source, skip.target) for skip in self.crossing]
        # A pass is over on all devices of a copy before the other one begins there.
        passes = ways, [way[::-1] for way in ways]
        self._numbers = {way: number for number, way in enumerate(dict.fromkeys((*passes[0], *passes[1])))}
        self.engines = self._engines(n)
        self.shared = [not in_order] * len(self.engines)
        for of_pass in passes:
            uses = Counter(self._numbers[way] for way in of_pass)
            engines = Counter(engine for link in uses for engine in self.engines[link])
            for link, times in uses.items():
                self.shared[link] |= times > 1 or any(engines[engine] > 1 for engine in self.engines[link])
        sizes = {*workload.microbatch_sizes}
        self.arrivals = {size: [self._into(workload, j, size) for j in range(n)] for size in sizes}
        self.awaits = [int(j + 1 < n) + sum(skip.source == j for skip in self.crossing) for j in range(n)]

    def _engines(self, n: int) -> list[tuple[int, ...]]:
        """Of each link those of its ends, and the bus that it goes over, if that is shared."""
        found: list[tuple[int, ...]] = []
        buses: dict[tuple[int, int], int] = {}
        for source, target in self._numbers:
            bus = self._machine.bus(self._devices[source], self._devices[target])
            shared = () if bus is None else (2 * n + buses.setdefault(bus, len(buses)),)
            found.append((source, n + target, *shared))
        return found

    def _into(self, workload: Workload, j: int, size: int) -> list[Arrival]:
        """What comes into a task of partition j."""
        if not j:
            return []
        portals = [self._portal(skip, size) for skip in self.crossing if skip.target == j]
        return [*portals, self._arrival(j - 1, j, None, workload.partitions[j][size].input_bytes)]

    def _portal(self, skip: SkipWork, size: int) -> Arrival:
        return self._arrival(skip.source, skip.target, skip.key, (skip.bytes[size],))

    def _arrival(self, source: int, target: int, key: str | None, nbytes: tuple[int, ...]) -> Arrival:
        kinds = ("copy", "copy_grad") if key is None else (f"portal {key}", f"portal_grad {key}")
        return Arrival(
            source, key, nbytes, *kinds, self._way(source, target, nbytes), self._way(target, source, nbytes)
        )

    def _way(self, source: int, target: int, nbytes: tuple[int, ...]) -> tuple[int, int]:
        ends = self._devices[source], self._devices[target]
        return self._numbers[source, target], sum(self._machine.copy_ns(*ends, size) for size in nbytes)
