"""Early recomputation without nodes of its own, where one thread of autograd runs all partitions backward.

The nodes that recompute, with Fork and Join between them (:mod:`gpipe_bench.engine.dependency`), cost the host more
than a small task. On several devices they must be there, each on the stream where the gradient arrives. Where one
thread runs everything and nothing is copied, their order follows from that of the checkpoints alone:

-   A recomputation node outranks every checkpoint, so it runs as soon as it can: R(i, j) after the last of B(i + 1, j)
    and the tasks that took what (i, j) gave out. So whoever finishes B says what may be recomputed now, and the next
    checkpoint begins with that, in the order of the nodes that are not there.
-   Of the checkpoints that are ready the one of the latest task runs first. Those of a partition become ready from the
    last micro-batch to the first, or at the same time; so none comes sooner for not being held back by a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary, ref

import torch

__all__ = ["Ahead", "Early"]

_Task = tuple[int, int]


class Early:
    """Task (i, j), to be recomputed ahead of its gradient.

    Args:
        ahead: of the batch.
        task: (i, j).
        rank: of the node that would recompute it.
    """

    __slots__ = ("__weakref__", "_ahead", "_fill", "_node", "_task", "rank")

    def __init__(self, ahead: Ahead, task: _Task, rank: int) -> None:
        self._ahead, self._task, self.rank = ahead, task, rank
        self._node: ref[Any] | None = None
        self._fill: Callable[[Any], None] | None = None

    def made(self, node: Any, fill: Callable[[Any], None]) -> None:
        """Take the task's checkpoint, which keeps this and must not be kept, and what recomputes the task, given it."""
        self._node, self._fill = ref(node), fill

    def catch_up(self, *, outranking: bool = False) -> None:
        """Recompute what may be recomputed; ``outranking``: as far as it comes before this task's own node."""
        self._ahead.catch_up(self.rank if outranking else -1)

    def recompute(self) -> None:
        """Recompute this task."""
        node = None if self._node is None else self._node()
        if node is not None and self._fill is not None:
            self._fill(node)

    def forget(self) -> None:
        """Drop what was recomputed for a backward pass that never came to it."""
        node = None if self._node is None else self._node()
        if node is not None:
            node.slot.take()

    def finished(self) -> None:
        """The task has been run backward."""
        self._ahead.finished(*self._task)


class Ahead:
    """What may be recomputed, in one batch.

    Its tasks keep it, and it keeps none of them: nothing waits for the garbage collector.

    Args:
        last: the last micro-batch with checkpoints.
        takes: for each partition, those whose outputs it takes.
    """

    def __init__(self, last: int, takes: Sequence[Sequence[int]]) -> None:
        self._last = last
        self._takes = takes
        self._takers = [sum(j in sources for sources in takes) for j in range(len(takes))]
        self._rank = 0
        self._left: dict[_Task, int] = {}
        self._tasks: WeakValueDictionary[_Task, Early] = WeakValueDictionary()
        self._pending: list[tuple[int, _Task]] = []
        self._pass: int | None = None

    def early(self, i: int, j: int, *, node: bool) -> Early:
        """The next task in the order in which the recomputation nodes would be made; ``node``: it has one."""
        early = Early(self, (i, j), self._rank)
        self._rank += 1
        if not node:
            self._tasks[i, j] = early
            self._left[i, j] = self._needs(i, j)
        return early

    def catch_up(self, rank: int) -> None:
        """Recompute what may be recomputed and outranks ``rank``; the first thing that a task does."""
        self._begin()
        while self._pending and self._pending[-1][0] > rank:
            early = self._tasks.get(self._pending.pop()[1])
            if early is not None:
                early.recompute()

    def finished(self, i: int, j: int) -> None:
        """Task (i, j) has been run backward."""
        for task in ((i - 1, j), *[(i, source) for source in self._takes[j]]):
            if task in self._left:
                self._left[task] -= 1
                if not self._left[task]:
                    early = self._tasks.get(task)
                    if early is not None:
                        self._pending.append((early.rank, task))
        if len(self._pending) > 1:
            self._pending.sort()

    def _begin(self) -> None:
        """Start anew where another backward pass of the same graph has come to an end, or to an exception."""
        this = torch._C._current_graph_task_id()  # noqa: SLF001 - as torch.utils.checkpoint does
        before, self._pass = self._pass, this
        if before not in (None, this):
            self._pending.clear()
            for task, early in self._tasks.items():
                self._left[task] = self._needs(*task)
                early.forget()

    def _needs(self, i: int, j: int) -> int:
        return (i < self._last) + self._takers[j]
