"""Host threads that carry out lists of actions: the runtime's schedules, with a loss for each micro-batch.

The counterpart of ``engine/runtime/runtime.py``. No node stands between the tasks, so there is no autograd.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

from gpipe_bench.schedules import Action
from gpipe_bench.simulator.workloads.workload import Kernels, Workload
from tests.simulator.oracle.graph import Node
from tests.simulator.oracle.host import Host
from tests.simulator.oracle.places import Places
from tests.simulator.oracle.recording import COPY, RecordingLanes
from tests.simulator.oracle.streams import Thread

__all__ = ["Lists", "record_cells"]

_FORWARD, _GRADIENTS = range(2)
_HALVES: Final = {"B": "backward", "I": "backward_inputs", "W": "backward_weights"}

_Cell = tuple[int, int, int]
"""Whose messages, and the task to which they go."""


def record_cells(lanes: RecordingLanes, work: Workload, lists: Sequence[Sequence[Action]], checkpointed: int) -> None:
    """Record copies, and tasks that keep their graph or are checkpoints."""
    again = {(i, j) for actions in lists for kind, i, j in actions if kind == "R"}
    for i in range(work.m):
        for j in range(work.n):
            for skip in work.skips:
                if lanes.portals and skip.target == j != skip.source:
                    lanes.portal(i, j, skip.key)
            if j:
                lanes.copy(i, j)
            lanes.launch(i, j, checkpoint=i < checkpointed or (i, j) in again)
            lanes.collect(i, j)
            node = lanes.running[i, j]
            node.single = node.kind == "checkpoint"
    lanes.keep()


class Lists:
    """The threads of one schedule.

    Args:
        lanes: what has been recorded.
        work: what tasks cost.
        places: devices and streams.
        host: issues what threads do.
        lists: the actions of each thread.
        ahead: how many micro-batches are recomputed ahead of their gradients, the first ones.
    """

    def __init__(
        self,
        lanes: RecordingLanes,
        work: Workload,
        places: Places,
        host: Host,
        lists: Sequence[Sequence[Action]],
        ahead: int,
    ) -> None:
        self._tasks, self._work, self._places, self._host = lanes.running, work, places, host
        self._lists, self._ahead = lists, ahead
        self._clock, self._memory = host.clock, host.memory
        copies = [action.node for action in lanes.actions if action.what == COPY and action.node is not None]
        self._copies = {(node.i, node.j, node.skip): node for node in copies}
        # Skips that leave and reach each partition by a portal.
        crossing = [skip for skip in work.skips if lanes.portals and skip.source != skip.target]
        self._leaving = [[skip for skip in crossing if skip.source == j] for j in range(work.n)]
        self._ending = [[skip for skip in crossing if skip.target == j] for j in range(work.n)]
        # The loss of each micro-batch is its share of the whole, so that all are the whole.
        sizes = [*map(abs, work.microbatch_sizes)]
        ends = [share * work.loss.duration_ns // sum(sizes) for share in accumulate(sizes, initial=0)]
        self._losses = [Kernels(end - start, work.loss.launches) for start, end in pairwise(ends)]

    def start(self, finished: Thread) -> None:
        """Let all threads begin; the last one that ends resumes ``finished``."""
        self._arrived: Counter[_Cell] = Counter()
        self._waiting: dict[_Cell, Thread] = {}
        self._running, self._finished = len(self._lists), finished
        for actions in self._lists:
            self._clock.resume(self._perform(actions))

    def _perform(self, actions: Sequence[Action]) -> Thread:
        for kind, i, j in actions:
            node = self._tasks[i, j]
            if kind == "F":
                yield from self._forward(node, i, j)
            elif kind == "R":
                yield from self._recompute(node)
            elif kind == "W":
                if self._learns(i, j):
                    yield from self._host.backward(node, _HALVES[kind])
            else:
                yield from self._backward(node, i, j, _HALVES[kind])
        self._running -= 1
        if not self._running:
            self._clock.resume(self._finished)

    def _streams(self, i: int, j: int) -> tuple[int, int]:
        """Where micro-batch i is computed on partition j, and where it is copied."""
        return self._places.computing[j], self._places.copying(i, j)

    def _learns(self, i: int, j: int) -> bool:
        return self._work.task(i, j).learns

    # --- messages ------------------------------------------------------------------------------------------------

    def _complete(self, cell: _Cell) -> bool:
        way, _, j = cell
        return self._arrived[cell] >= (1 if way == _GRADIENTS else (j > 0) + len(self._ending[j]))

    def _await(self, cell: _Cell) -> Iterator[int | None]:
        if not self._complete(cell):
            self._waiting[cell] = self._clock.current
            yield None

    def _deliver(self, cell: _Cell) -> None:
        self._arrived[cell] += 1
        if cell in self._waiting and self._complete(cell):
            self._clock.resume(self._waiting.pop(cell))

    # --- actions -------------------------------------------------------------------------------------------------

    def _forward(self, node: Node, i: int, j: int) -> Iterator[int | None]:
        computing, copying = self._streams(i, j)
        yield from self._await((_FORWARD, i, j))
        self._clock.wait(computing, copying)
        yield from self._host.forward(node)
        self._clock.wait(copying, computing)
        if self._memory is not None:
            self._memory.collected(node)
        if j == self._work.n - 1:
            return
        for target, key in ((j + 1, None), *((skip.target, skip.key) for skip in self._leaving[j])):
            copy = self._copies.get((i, target, key))
            if copy is not None:
                yield from self._host.transfer(copy)
            self._deliver((_FORWARD, i, target))

    def _recompute(self, node: Node) -> Iterator[int | None]:
        """Fill a checkpoint, unless that has been done."""
        if node.kind == "checkpoint" and not node.filled:
            node.filled = True
            yield from self._host.forward(node, again=True)

    def _backward(self, node: Node, i: int, j: int, kind: str) -> Iterator[int | None]:
        computing, copying = self._streams(i, j)
        if i < self._ahead:
            yield from self._recompute(node)
        if j < self._work.n - 1:
            yield from self._await((_GRADIENTS, i, j))
        else:
            if self._memory is not None:
                self._memory.microbatch_loss(i)
            yield from self._host.kernels(computing, self._losses[i])
        self._clock.wait(computing, copying)
        if self._learns(i, j):
            yield from self._recompute(node)
            yield from self._host.backward(node, kind)
        self._clock.wait(copying, computing)
        if not j:
            return
        for key in (None, *(skip.key for skip in self._ending[j])):
            copy = self._copies.get((i, j, key))
            if copy is not None and copy.returned:
                yield from self._host.transfer(copy, back=True)
        self._deliver((_GRADIENTS, i, j - 1))
