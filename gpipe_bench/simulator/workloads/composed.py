"""Work of partitions that was composed before: cells of a sweep share most of theirs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

from gpipe_bench.simulator.hardware.profile import Profile
from gpipe_bench.simulator.workloads.blocks import Costs
from gpipe_bench.simulator.workloads.compose import PartitionWork

__all__ = ["Composed"]

_MOST: Final = 2**19
"""Requests to allocators, of all that is kept; some 70 MB."""


class Composed:
    """The work of partitions of one model; when it is too much, it is made anew."""

    def __init__(self) -> None:
        self._costs: dict[str, Costs] = {}
        self._works: dict[Hashable, PartitionWork] = {}
        self._requests = 0

    def costs(self, profile: Profile) -> Costs:
        """Durations of the layers on a device."""
        return self._costs.setdefault(repr(profile), Costs(profile))

    def partition(self, costs: Costs, key: Hashable, make: Callable[[], PartitionWork]) -> PartitionWork:
        """The work of a partition, made if it is not there.

        Args:
            costs: of :meth:`costs`.
            key: everything else that it depends on.
            make: makes it.
        """
        place = id(costs), key
        if place not in self._works:
            if self._requests > _MOST:
                self._works, self._requests = {}, 0
            work = self._works[place] = make()
            task = work.task
            self._requests += len(task.forward_memory) + len(task.graph_memory) + len(task.backward_memory)
        return self._works[place]
