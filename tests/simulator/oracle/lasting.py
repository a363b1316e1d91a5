"""What stays between passes and steps: parameters, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.simulator.workloads.workload import Workload
from tests.simulator.oracle.allocator import Allocator, Block, drop_all
from tests.simulator.oracle.places import Places

__all__ = ["Lasting"]


class Lasting:
    """Parameters and buffers, which come to their devices at once, and what steps make.

    Args:
        workload: sizes.
        places: devices and streams.
        homes: allocator and compute stream of each partition.
        keeps_gradients: whether gradients are set to zero between steps, rather than given up.

    Attributes:
        gradients: of each partition's parameters, once they are there.
        alone: partitions whose gradients are those of one task without checkpoint, to which none were added yet.
        has_state: whether there is an optimizer's state.
    """

    def __init__(
        self, workload: Workload, places: Places, homes: Sequence[tuple[Allocator, int]], *, keeps_gradients: bool
    ) -> None:
        self._work, self._places, self._homes, self._keeps_gradients = workload, places, homes, keeps_gradients
        self.gradients: dict[int, list[Block]] = {}
        self.alone: set[int] = set()
        self.has_state = False
        self._settle()

    def make(self, j: int, gradients: list[Block], *, is_open: bool) -> None:
        """A step's first backward pass of partition j has made gradients of its parameters."""
        self.gradients[j] = gradients
        self._complete_gradients(j)
        if is_open:
            self.alone.add(j)

    def next_step(self) -> None:
        """Gradients are set to zero or given up."""
        if not self._keeps_gradients:
            for gradients in self.gradients.values():
                drop_all(gradients)
            self.gradients.clear()
            self.alone.clear()

    def _settle(self) -> None:
        """Parameters and buffers come to their devices."""
        workload = self._work
        if workload.static:
            for j, static in enumerate(workload.static):
                for nbytes in static.resident:
                    self._on_default_stream(j, nbytes)
            return
        for j, nbytes in enumerate(workload.static_bytes):
            if nbytes:
                self._on_default_stream(j, nbytes)

    def _on_default_stream(self, j: int, nbytes: int) -> None:
        allocator, device = self._homes[j][0], self._places.devices[j]
        allocator.alloc(nbytes, device)

    def update(self) -> None:
        """The optimizer changes the parameters; the first time it makes its state."""
        for j, static in enumerate(self._work.static):
            if not self.has_state:
                for nbytes in static.state:
                    self._new(j, nbytes)
            if static.temporary:
                self._new(j, static.temporary).drop()
        self.has_state = True

    def _complete_gradients(self, j: int) -> None:
        """Gradients that were no blocks of the backward pass, such as copies of views."""
        if self._work.static:
            there = sum(block.requested for block in self.gradients[j])
            missing = self._work.static[j].gradients - there
            if missing > 0:
                self.gradients[j].append(self._new(j, missing))

    def _new(self, j: int, nbytes: int) -> Block:
        allocator, stream = self._homes[j]
        return allocator.alloc(nbytes, stream)
