"""The memory of a partition as an automaton: its compute stream, and each of its copy streams."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gpipe_bench.simulator.allocator import Block
from gpipe_bench.simulator.passes import OpenGraph, Passes, drop_all
from gpipe_bench.simulator.places import Places
from gpipe_bench.simulator.pool_states import Automaton, Group, spots
from gpipe_bench.simulator.pools import Spot
from gpipe_bench.simulator.programs import Placed
from gpipe_bench.simulator.workload import TaskWork, Workload

__all__ = ["LEFT", "RETURNED", "SHARED", "CopyStates", "HomeStates"]

LEFT, RETURNED, SHARED = range(3)
"""Queues: outputs that were sent on, gradients that were sent back, outputs that a graph holds until it has run."""

_USER: Final = 1


class _Held(NamedTuple):
    """What a compute stream's blocks hold between passes.

    Attributes:
        stack: graphs of tasks without checkpoint, the last one first: (graph, the others).
        outputs: of the last partition: ((blocks, bytes asked for), the others).
        graph: of a recomputation.
        loss: the gradient of the outputs.
        gradients: of the parameters, once they are there.
        state: whether there is an optimizer's state.
    """

    stack: tuple[Placed, Any] | None = None
    outputs: tuple[tuple[Group, int], Any] | None = None
    graph: Placed | None = None
    loss: Group | None = None
    gradients: Group | None = None
    state: bool = False


class HomeStates(Automaton):
    """The compute stream of a partition.

    Args:
        workload: of all partitions.
        j: the partition.

    Attributes:
        base: bytes in use at the start: as allocated, and as asked for.
    """

    def __init__(self, workload: Workload, j: int) -> None:
        super().__init__(3)
        self._works, self._first, self._last = workload.partitions[j], j == 0, j == workload.n - 1
        own = Workload(
            (self._works,),
            workload.microbatch_sizes,
            static_bytes=workload.static_bytes[j : j + 1],
            static=workload.static[j : j + 1],
        )
        places = Places([0], copy_streams=False, transfer="direct")
        self._passes = Passes(own, places, [self.allocator], keeps_gradients=False)
        if self._first:
            for nbytes in zip(*(self._works[size].input_bytes for size in workload.microbatch_sizes), strict=True):
                self.new(sum(nbytes))
        self._graphs: dict[tuple[tuple[int, Spot], ...], Placed] = {}
        self.base = self.allocator.allocated, self.allocator.live
        self.start = self.enter(((), (), ()), _Held())

    def forward(self, held: _Held, size: int) -> tuple[Group, _Held]:
        """The first pass of a checkpoint."""
        work = self._works[size]
        left = self._passes.plain(0, work)
        if not work.leaving:
            left = [self.new(nbytes) for nbytes in work.output_bytes]
        return self._leave(held, left, left)

    def forward_task(self, held: _Held, size: int) -> tuple[Group, _Held]:
        """The forward pass of a task without checkpoint, whose graph holds what it gives out."""
        work = self._works[size]
        graph, shared = self._passes.open_graph(0, work)
        assert isinstance(graph, OpenGraph)  # noqa: S101 - a device without limit is never full
        held = held._replace(stack=self.push(self._one_of(graph.placed), held.stack))
        if work.leaving:
            return self._leave(held, [], shared)
        left = [self.new(nbytes) for nbytes in work.output_bytes]
        return self._leave(held, left, left)

    def _leave(self, held: _Held, own: Sequence[Block], left: Sequence[Block]) -> tuple[Group, _Held]:
        """Blocks ``left`` are given out, of which nobody else holds those in ``own``."""
        if self._last:
            entry = spots(own), sum(block.requested for block in left)
            return (), held._replace(outputs=self.push(entry, held.outputs))
        return self.send(LEFT, own), held

    def loss(self, held: _Held) -> tuple[Group, _Held]:
        """Outputs are concatenated, and their gradient is made."""
        outputs: list[tuple[Group, int]] = []
        while held.outputs is not None:
            outputs.append(held.outputs[0])
            held = held._replace(outputs=held.outputs[1])
        nbytes = sum(requested for _, requested in outputs)
        together = self.new(nbytes)
        for group, _ in outputs:
            drop_all(map(self.block, group))
        gradient = self.new(nbytes)
        together.drop()
        return (), held._replace(loss=self.intern(spots([gradient])))

    def recompute(self, held: _Held, size: int) -> tuple[Group, _Held]:
        """The second pass of a checkpoint."""
        graph = self._passes.graph(0, self._works[size])
        assert isinstance(graph, Placed)  # noqa: S101 - a device without limit is never full
        return (), held._replace(graph=graph)

    def backward(self, held: _Held, size: int, way: tuple[bool, bool, bool]) -> tuple[Group, _Held]:
        """A backward pass; ``way``: whether it has no checkpoint, is a step's first, or its last."""
        open_graph, first, last = way
        work = self._works[size]
        graph: Any = held.graph
        if open_graph:
            assert held.stack is not None  # noqa: S101 - a forward pass left it
            graph = self._opened(work, held.stack[0])
            held = held._replace(stack=held.stack[1])
        self._passes.gradients = {} if first else {0: []}
        returned = self._passes.backward(0, work, graph)
        held = held._replace(graph=None)
        if first:
            held = held._replace(gradients=self.intern(spots(self._passes.gradients[0])))
        if not work.returning and not self._first:
            returned = [self.new(nbytes) for nbytes in work.input_bytes]
        if open_graph and not self._last and not self.watch.passed:
            self.send(SHARED, self.allocator.take_deferred())
        if self._last and last:
            drop_all(map(self.block, held.loss or ()))
            held = held._replace(loss=None)
        if self._first:
            drop_all(returned)
            return (), held
        return self.send(RETURNED, returned), held

    def _one_of(self, placed: Placed) -> Placed:
        """The one object for all graphs whose blocks are at the same places."""
        where = tuple(item for done in placed.done for item in done.spots.items())
        return self._graphs.setdefault(where, placed)

    def _opened(self, work: TaskWork, placed: Placed) -> OpenGraph:
        graph = self._passes.opened(0, work, placed)
        if not self._last:
            for block in graph.shared.values():
                block.users = (_USER,)
        return graph

    def update(self, held: _Held) -> tuple[Group, _Held]:
        """The optimizer's update."""
        self._passes.has_state = held.state
        self._passes.update()
        return (), held._replace(state=True)

    def renew(self, held: _Held) -> tuple[Group, _Held]:
        """The optimizer's update, and the next step gives the gradients up."""
        _, held = self.update(held)
        drop_all(map(self.block, held.gradients or ()))
        return (), held._replace(gradients=None)


class CopyStates(Automaton):
    """A copy stream of a partition: what comes from the partition before, and from the next one."""

    def __init__(self) -> None:
        super().__init__(1)
        self.start = self.enter(((),), (None,))

    def arrive(self, held: tuple[Any], sizes: Sequence[int]) -> tuple[Group, tuple[Any]]:
        """Inputs come, and are kept until their task's backward pass has run."""
        return (), (self.push(spots([self.new(nbytes) for nbytes in sizes]), held[0]),)

    def leave(self, held: tuple[Any], sizes: Sequence[int]) -> tuple[Group, tuple[Any]]:
        """Gradients come; with the backward pass that follows they go, and so do its inputs if any are kept."""
        group = spots([self.new(nbytes) for nbytes in sizes])
        if held[0] is not None:
            group, held = group + held[0][0], (held[0][1],)
        self.queues[0] += (self.intern(group),)
        return (), held
