"""Peak of live tensor bytes per partition, for devices whose allocator keeps no statistics: the CPU.

Every tensor operation is seen below autograd. What it allocates counts to the partition whose task runs in that
thread; in a backward pass without checkpoint to the partition that the autograd node belongs to; outside tasks
(gather, loss, optimizer) to the owner of its first counted operand:

    main thread       with LiveBytes(pipe): mode on ── loss, backward: recompute, nested backward, gradients ── off
    worker of j       start(F(i,j)): mode on ── operations of partition j ── finish: mode off

Autograd runs a node under the modes of the thread that called ``backward``, so the mode that is on there covers the
whole backward pass, while a mode switched on inside a node would be gone with the node. Parameters, buffers and their
gradients count from the start; inputs from outside when a task first reads them. What a copy allocates belongs to the
partition that next computes with it. Workspaces inside kernels are not seen.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from gpipe_bench.engine.observer import Task
from gpipe_bench.measure.backward_nodes import BackwardNodes
from gpipe_bench.measure.ledger import Ledger
from gpipe_bench.measure.watch import Watch, is_watched, switch_off, switch_on
from gpipe_bench.results.timeline import COPY_KINDS


@dataclass(slots=True, eq=False)
class _Running:
    """A task under observation: the token between start and finish."""

    task: Task
    among: list[_Running]
    watch: Watch | None = None


class _Thread(threading.local):
    def __init__(self) -> None:
        self.running: list[_Running] = []
        self.nodes = BackwardNodes()


@dataclass(frozen=True, slots=True)
class LivePoint:
    """Live bytes at the end of a task.

    Attributes:
        task: the task.
        live_bytes: of each partition.
    """

    task: Task
    live_bytes: tuple[int, ...]


class LiveBytes:
    """Counts live tensor bytes, and is an :class:`gpipe_bench.engine.observer.Observer` for a pipeline.

        with LiveBytes(pipe) as live, pipe.observe(live):
            step()
        live.peak_bytes
        live.timeline  # live bytes after each task

    Enter it in the thread that calls ``backward``. It slows every operation down: never time a step under it.

    Args:
        module: a pipeline, whose ``partitions`` are counted apart; any other module counts as one partition, and
            needs no tasks.
    """

    def __init__(self, module: nn.Module) -> None:
        partitions: Any = getattr(module, "partitions", None)
        self._partitions: list[nn.Module] = [module]
        # Whose an operation without counted operands is: in a pipeline nobody's, until a task reads its result.
        self._default: int | None = 0
        if isinstance(partitions, (list, tuple, nn.ModuleList)):
            self._partitions, self._default = list(partitions), None
        self._ledger = Ledger(len(self._partitions))
        self._timeline: list[LivePoint] = []
        self._thread = _Thread()
        self._watch: Watch | None = None

    @property
    def timeline(self) -> list[LivePoint]:
        """Live bytes after each task, in the order in which tasks ended."""
        return list(self._timeline)

    @property
    def peak_bytes(self) -> list[int]:
        """The most bytes alive at once, by partition; partitions need not peak together."""
        return self._ledger.peak_bytes

    @property
    def peak_total_bytes(self) -> int:
        """The most bytes alive at once in all partitions."""
        return self._ledger.peak_total_bytes

    @property
    def live_bytes(self) -> list[int]:
        """Bytes alive now, by partition."""
        return self._ledger.live_bytes

    def __enter__(self) -> Self:
        for j, partition in enumerate(self._partitions):
            self._ledger.enter(_state(partition), j)
        self._watch = switch_on(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        watch, self._watch = self._watch, None
        switch_off(watch)
        self._thread.nodes.clear()

    def start(self, task: Task) -> _Running:
        """Count what this thread allocates to the partition of ``task``."""
        running = _Running(task, self._thread.running)
        if not is_watched(self):
            running.watch = switch_on(self)
        running.among.append(running)
        if task.kind == "backward":
            self._thread.nodes.begin(task.partition)
        return running

    def finish(self, token: _Running, nbytes: int) -> None:  # noqa: ARG002 - the interface of an observer
        """End the task of ``token``; further calls do nothing.

        Args:
            token: what :meth:`start` returned.
            nbytes: not used: allocations were counted as they came.
        """
        if token in token.among:
            token.among.remove(token)
            self._timeline.append(LivePoint(token.task, tuple(self._ledger.live_bytes)))
        watch, token.watch = token.watch, None
        switch_off(watch)

    def account(self, operands: Sequence[Tensor], results: Sequence[Tensor]) -> None:
        """Enter one operation, which this thread has just run."""
        if self._watch is None:
            return
        task = self._thread.running[-1].task if self._thread.running else None
        owner = self._owner(operands) if task is None else task.partition
        if owner is None:
            self._ledger.refresh([*operands, *results])
        elif task is not None and task.kind in COPY_KINDS:
            self._ledger.refresh(operands)
            self._ledger.enter(results, owner, in_transit=True)
        else:
            self._ledger.enter([*operands, *results], owner)

    def _owner(self, operands: Sequence[Tensor]) -> int | None:
        """Whose an operation outside tasks is."""
        owner = self._thread.nodes.current()
        owner = self._ledger.owner(operands) if owner is None else owner
        return self._default if owner is None else owner


def _state(partition: nn.Module) -> Iterator[Tensor]:
    yield from partition.buffers()
    for parameter in partition.parameters():
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
