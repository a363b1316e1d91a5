"""Whose turn comes first within one nanosecond.

The clock keeps an agenda: what is due at one time comes in the order in which it was entered. A host thread enters its
next turn when it has issued something; an operation enters its end when it starts, after the turns of that time; a
thread that waits for a start enters its next turn after that. So a turn is its time and its entry:

    entry = 2 t          entered at time t by a host thread         an operation that starts at t ends before turns
          = 2 t + 1      at time t, after a start                   of the same time whose entry is above 2 t

A device's thread of autograd goes on by itself, or is woken by the next device's thread, whichever comes last. Threads
of neighbours that keep in step have the same times again and again; then the one goes first that went first before.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.simulator.known_order.tables import Integers

__all__ = ["Turns", "Unclear", "passed"]

Flags = NDArray[np.bool_]


class Unclear(Exception):  # noqa: N818 - not an error: another way has to be taken
    """Which of two turns comes first is not known."""


def passed(ends: Integers, entered: Integers, times: Integers, entries: Integers) -> Integers:
    """How many of the ends are over at each turn.

    Args:
        ends: of operations, or turns, rising.
        entered: their entries; of an operation twice its start.
        times: of turns.
        entries: of turns.
    """
    if not len(ends):
        return np.zeros_like(times)
    count: Integers = np.searchsorted(ends, times)
    last = np.minimum(count, len(ends) - 1)
    count += (count < len(ends)) & (ends[last] == times) & (entered[last] < entries)
    return count


class Turns:
    """The turns of all devices' threads in a backward pass.

    Args:
        shape: (m+n-1, n): by cycle and partition.

    Attributes:
        entries: of a task's first turn (``recompute``), of its backward pass and of sending its gradients, each of
            that shape.
        ahead: whether the next device's thread sends the gradients of this cycle before this one does.
    """

    def __init__(self, shape: tuple[int, int]) -> None:
        self.entries = {kind: np.full(shape, -1, dtype=np.int64) for kind in ("recompute", "backward", "copy_grad")}
        self.ahead = np.zeros(shape, dtype=np.bool_)
        self._n = shape[1]
        # Of each thread, the entry with which it was through with its last task, and whether the next one was before.
        self._last = np.full(shape[1], -1, dtype=np.int64)
        self._before = np.zeros(shape[1], dtype=np.bool_)
        self._before[-1] = True
        # Of the turns of a cycle: where, their times and entries, and whether the next device's comes first.
        self._where: tuple[int, slice] = (0, slice(0))
        self._times = self._entries = self._last
        self._order: Flags = self._before

    def begin(self, entry: int) -> None:
        """The last device's thread has issued the loss, and goes on by itself."""
        self._last[-1] = entry

    def first(self, k: int, part: slice, times: Integers, done: Integers) -> None:
        """The first turns of a cycle's tasks.

        Args:
            k: the cycle.
            part: its partitions.
            times: of the turns.
            done: when threads were through with the cycle before, for all partitions.
        """
        self._where = k, part
        behind = np.append(done[1:], -1)[part]
        # By itself, if it was through after the next one, or with it and later in the order of turns.
        alone = (done[part] > behind) | ((done[part] == behind) & self._before[part]) if k else np.array([True])
        entries = np.where(alone, self._last[part], 2 * times)
        # Where two go on at the same time, the next device's thread is first if it goes on by itself.
        self._order = np.append(self._before[part][1:], True)
        self._turn("recompute", times, entries)

    def backward(self, times: Integers, entries: Integers, again: Flags) -> None:
        """The turns after recomputations; ``again``: where there are any."""
        unlike = again != np.append(again[1:], again[-1:])
        self._turn("backward", times, np.where(again, entries, self._entries), unlike)

    def send(self, times: Integers, entries: Integers) -> None:
        """The turns after backward passes."""
        self._turn("copy_grad", times, entries)
        self.ahead[self._where] = self._order

    def finish(self, times: Integers) -> None:
        """The threads are through with their tasks."""
        _, part = self._where
        entries, unlike = 2 * self._times, np.zeros(len(times), dtype=np.bool_)
        if part.start == 0:
            # The first device sends nothing.
            entries[0], unlike[0] = self._entries[0], True
        self._turn(None, times, entries, unlike)
        self._before[part] = self._order
        self._last[part] = entries

    def _turn(self, kind: str | None, times: Integers, entries: Integers, unlike: Flags | None = None) -> None:
        """Whose turns come first; ``unlike``: where neighbours have not come to the same."""
        if kind is not None:
            self.entries[kind][self._where] = entries
        together = (times[1:] == times[:-1]) & (entries[1:] == entries[:-1])
        unclear = (entries[1:] & 1).astype(np.bool_) if kind != "recompute" else np.zeros_like(together)
        if unlike is not None:
            unclear |= unlike[:-1]
        if (together & unclear).any():
            raise Unclear
        first = (times[1:] < times[:-1]) | ((times[1:] == times[:-1]) & (entries[1:] < entries[:-1]))
        self._order = np.append(np.where(together, self._order[:-1], first), True)
        self._times, self._entries = times, entries
