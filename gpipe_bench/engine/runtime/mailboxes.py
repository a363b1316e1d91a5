"""What partitions send each other: a box for each value, which one action fills and one empties."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from torch import Tensor, nn

from gpipe_bench.engine.randomness import BatchRandomness
from gpipe_bench.engine.tied import Copies
from gpipe_bench.schedules import Action
from gpipe_bench.skip.layout import SkipCopy

Key = tuple[str, int, int, SkipCopy | None]
"""(way, i, j, skip) of a value that goes to partition j: ``F``, an activation, or ``B``, a gradient, of micro-batch i;
``skip`` is None for the values of the micro-batch itself."""

_WAKE = object()


class Stopped(Exception):  # noqa: N818 - no error of its own: another action has failed
    """The awaited value will never come."""


class Mailboxes:
    """The boxes of one process, for its threads.

    Attributes:
        limit: actions from this position on, in one order of all, will not run.
    """

    def __init__(self) -> None:
        self._boxes: dict[Key, SimpleQueue[Any]] = {}
        self.limit = sys.maxsize
        self._lock = threading.Lock()

    def put(self, key: Key, value: Any) -> None:
        """Fill a box."""
        self._box(key).put(value)

    def take(self, key: Key, position: int) -> Any:
        """Wait until a box is filled, and empty it; raises Stopped if the action at ``position`` will not run."""
        with self._lock:
            box = self._box(key)
            if position >= self.limit:
                raise Stopped
        while (value := box.get()) is _WAKE:
            if position >= self.limit:
                raise Stopped
        return value

    def done(self, action: Action) -> None:
        """Called when an action has ended."""

    def fail(self, action: Action, position: int, error: BaseException) -> None:  # noqa: ARG002 - for other processes
        """Called when an action has failed."""
        self.stop(position)

    def stop(self, position: int = -1) -> None:
        """Let no action from this position on run, and wake all that wait."""
        with self._lock:
            self.limit = min(self.limit, position)
            waiting = list(self._boxes.values())
        for box in waiting:
            box.put(_WAKE)

    def clear(self) -> None:
        """Drop all values."""
        self._boxes.clear()

    def enter(self, randomness: BatchRandomness, order: Sequence[Action]) -> Sequence[Action]:  # noqa: ARG002 - as fail
        """Called before the first action of a batch: gives those of an order that this process carries out."""
        return order

    def tied_grads(self, copies: Copies) -> list[tuple[nn.Parameter, Tensor | None]]:
        """Called after the last action: gives the gradients to be added to the tied weights of this process."""
        return [(copy.parameter, copy.take_grad()) for copy in copies.leaves]

    def leave(self, randomness: BatchRandomness, total: Callable[[], Tensor] | None = None) -> Any:  # noqa: ARG002
        """Called after the last action: gives the loss of the batch, which the process with the last partition has."""
        return total and total()

    def _box(self, key: Key) -> SimpleQueue[Any]:
        # Threads may ask for one box at the same time: setdefault gives both the same.
        return self._boxes.setdefault(key, SimpleQueue())
