"""Work of partitions that was composed before: cells of a sweep share most of theirs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final

from gpipe_bench.simulator.hardware.profile import Profile
from gpipe_bench.simulator.workloads.blocks import Costs
from gpipe_bench.simulator.workloads.compose import PartitionWork

__all__ = ["Composed"]

_MOST: Final = 2**19
"""Requests to allocators, of all that is kept; some 70 MB."""


class Composed:
    """The work of partitions of one model; the oldest is dropped first."""

    def __init__(self) -> None:
        self._costs: dict[str, Costs] = {}
        self._works: OrderedDict[Hashable, PartitionWork] = OrderedDict()
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
        if place in self._works:
            self._works.move_to_end(place)
            return self._works[place]
        work = self._works[place] = make()
        self._requests += _requests(work)
        while self._requests > _MOST and len(self._works) > 1:
            _, old = self._works.popitem(last=False)
            self._requests -= _requests(old)
        return work


def _requests(work: PartitionWork) -> int:
    task, split = work.task, work.task.split
    own = len(task.forward_memory) + len(task.graph_memory) + len(task.backward_memory)
    return own + (0 if split is None else len(split.inputs_memory) + len(split.weights_memory))
