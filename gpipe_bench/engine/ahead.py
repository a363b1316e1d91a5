"""Early recomputation without nodes of its own, where one thread of autograd runs all partitions backward.

The nodes that recompute, with Fork and Join between them (:mod:`gpipe_bench.engine.dependency`), cost the host more
than a small task. On several devices they must be there, each on the stream where the gradient arrives. Where one
thread runs everything and nothing is copied, their order follows from that of the checkpoints alone:

-   A recomputation node outranks every checkpoint, so it runs as soon as it can: R(i, j) after the last of B(i + 1, j)
    and the tasks that took what (i, j) gave out. So whoever finishes B says what may be recomputed now, and the next
    task begins with that, in the order of the nodes that are not there. A task without checkpoint does so by a hook on
    its output, and as no other begins before it has finished, that is said there, too.
-   Of the checkpoints that are ready the one of the latest task runs first. Those of a partition become ready from the
    last micro-batch to the first, or at the same time; so none comes sooner for not being held back by a lane.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor

__all__ = ["Ahead", "Early"]

_Task = tuple[int, int]


class Early:
    """Task (i, j), to be recomputed ahead of its gradient.

    Args:
        ahead: of the batch.
        task: (i, j).
        rank: of the node that would recompute it.
    """

    __slots__ = ("_ahead", "_rank", "_task")

    def __init__(self, ahead: Ahead, task: _Task, rank: int) -> None:
        self._ahead, self._task, self._rank = ahead, task, rank

    def made(self, node: Any) -> None:
        """Take the task's checkpoint, which keeps this and must not be kept."""
        self._ahead.note(self._task, node)

    def catch_up(self, *, outranking: bool = False) -> None:
        """Recompute what may be recomputed; ``outranking``: as far as it comes before this task's own node."""
        self._ahead.catch_up(self._rank if outranking else -1)

    def finished(self) -> None:
        """The task has been run backward."""
        self._ahead.finished(*self._task)


class Ahead:
    """What may be recomputed, in one batch.

    Its tasks keep it, and it keeps none of them: nothing waits for the garbage collector.

    Args:
        last: the last micro-batch.
        takes: for each partition, those whose outputs it takes.
        fill: recomputes a task, given its checkpoint.
    """

    def __init__(self, last: int, takes: Sequence[Sequence[int]], fill: Callable[[Any], None]) -> None:
        self._last = last
        self._takes = takes
        self._takers = [sum(j in sources for sources in takes) for j in range(len(takes))]
        self._fill = fill
        self._count = 0
        # of tasks without a node that recomputes them
        self._left: dict[_Task, int] = {}
        self._ranks: dict[_Task, int] = {}
        self._checkpoints: dict[_Task, ref[Any]] = {}
        self._pending: list[tuple[int, _Task]] = []
        self._pass: int | None = None

    def early(self, i: int, j: int, *, node: bool) -> Early:
        """The next task in the order in which the recomputation nodes would be made; ``node``: it has one."""
        rank, self._count = self._count, self._count + 1
        if not node:
            self._ranks[i, j] = rank
            self._left[i, j] = self._needs(i, j)
        return Early(self, (i, j), rank)

    def note(self, task: _Task, checkpoint: Any) -> None:
        """Look there for what is to be recomputed, as long as the checkpoint is kept."""
        if task in self._ranks:
            self._checkpoints[task] = ref(checkpoint)

    def precede(self, i: int, j: int, outputs: Sequence[Any]) -> None:
        """Catch up before task (i, j), without checkpoint, begins its backward pass at ``outputs``."""
        for output in outputs:
            node = output.grad_fn if isinstance(output, Tensor) else None
            if node is not None:
                node.register_prehook(partial(self._begins, i, j))

    def _begins(self, i: int, j: int, _: object) -> None:
        self.catch_up(-1)
        self.finished(i, j)

    def catch_up(self, rank: int) -> None:
        """Recompute what may be recomputed and outranks ``rank``; the first thing that a task does."""
        self._begin()
        while self._pending and self._pending[-1][0] > rank:
            checkpoint = self._checkpoints[self._pending.pop()[1]]()
            if checkpoint is not None:
                self._fill(checkpoint)

    def finished(self, i: int, j: int) -> None:
        """Task (i, j) has been run backward, or will have been before another begins; it is not recomputed any more."""
        if (i, j) in self._left:
            self._left[i, j] = 0
        for task in ((i - 1, j), *[(i, source) for source in self._takes[j]]):
            left = self._left.get(task)
            if left:
                self._left[task] = left - 1
                if left == 1 and task in self._checkpoints:
                    self._pending.append((self._ranks[task], task))
        if len(self._pending) > 1:
            self._pending.sort()

    def _begin(self) -> None:
        """Start anew where another backward pass of the same graph has come to an end, or to an exception.

        What was recomputed for a backward pass that never came to it is dropped.
        """
        this = torch._C._current_graph_task_id()  # noqa: SLF001 - as torch.utils.checkpoint does
        before, self._pass = self._pass, this
        if before not in (None, this):
            self._pending.clear()
            for task, found in self._checkpoints.items():
                self._left[task] = self._needs(*task)
                checkpoint = found()
                if checkpoint is not None:
                    checkpoint.slot.take()

    def _needs(self, i: int, j: int) -> int:
        return (i < self._last) + self._takers[j]
