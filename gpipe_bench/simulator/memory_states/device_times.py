"""The turns on one device of a run whose times are known, and what had come back before each.

Arrays are (steps, m): micro-batches in ascending order in the forward pass, in descending order in the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.simulator.known_order.step_times import Flags, Integers, Step
from gpipe_bench.simulator.known_order.turns import Unclear, passed
from gpipe_bench.simulator.memory_states.come_backs import Backs, Moments, come_backs

__all__ = ["DeviceTimes"]

_NEVER: Final = np.zeros(0, dtype=np.int64)


class DeviceTimes:
    """The turns on one device, and the ends of what its blocks wait for.

    Args:
        steps: times of all devices.
        j: the partition.
        m: micro-batches.
        n: partitions.
        again: whether each task is recomputed, in the order of the backward pass.
    """

    def __init__(self, steps: Sequence[Step], j: int, m: int, n: int, again: Flags) -> None:
        self._steps, self._m, self._n, self._again, self._j = steps, m, n, again, j
        self._forward = self._column("issue", "forward", j)
        self._tasks, self._entries = self._turns("backward", j)
        first, self._first_entries = self._turns("recompute", j)
        # Without a recomputation its turn is that of the backward pass.
        self._first = np.where(again, first, self._tasks)

    def back(self, more: Sequence[tuple[str, int]] = ()) -> list[Backs]:
        """For each pass of the compute stream, what comes back before it of each of its queues.

        In the order of :mod:`gpipe_bench.simulator.memory_states.home_states`, then those that go with ``more`` copies,
        by kind and partition; each of the passes of all steps.
        """
        j, n, count = self._j, self._n, len(self._steps)
        updates = np.array([step.update for step in self._steps])
        losses = np.array([[step.loss] for step in self._steps])[:, : int(j == n - 1)]
        there = np.stack([self._again, np.ones_like(self._again)], axis=1).reshape(-1)
        tasks, entries = (
            np.stack(pair, axis=2).reshape(count, -1)[:, there]
            for pair in ((self._first, self._tasks), (self._first_entries, self._entries))
        )
        times = np.concatenate([self._forward, losses, tasks, updates[:, :1]], axis=1).reshape(-1)
        turns = np.concatenate([2 * self._forward, 2 * losses, entries, updates[:, 1:]], axis=1).reshape(-1)
        return [*self._sent(Moments(times, turns), more)]

    def _sent(self, turns: Moments, more: Sequence[tuple[str, int]]) -> Iterator[Backs]:
        j, n, count = self._j, self._n, len(self._steps)
        yield come_backs(self._ended("copy", j + 1), turns)
        yield come_backs(self._ended("copy_grad", j), turns)
        # What a graph held goes when the gradient for it has come, but not before its backward pass.
        ended = self._before("shared")
        if j + 1 == n:
            ended = Moments(_NEVER, _NEVER)
        open_graphs = np.tile(~self._again, count)[: len(ended.times)]
        passes = len(turns.times) // count
        places = passes - 1 - self._m - self._again.sum() + np.cumsum(1 + self._again) - 1
        least = (places + passes * np.arange(count)[:, None]).reshape(-1)
        shared = (part[open_graphs] for part in (*ended, least[: len(ended.times)]))
        times, entries, first = shared
        yield come_backs(Moments(times, entries), turns, first)
        for copies in more:
            yield come_backs(self._ended(*copies), turns)

    def copies_back(self, early: Flags | None = None) -> NDArray[np.int64]:
        """(steps, 2, m): how many groups of blocks had come back before each copy, and each gradient.

        A task's gradients, and inputs that it kept until then, are a group, in the order of the backward pass. What
        comes back in a turn that ties with a copy's may be missing; it belongs to another copy stream.

        Args:
            early: (m, 2) which micro-batches have inputs that go with their forward pass, and which have some that go
                when they have been passed on: groups before all others.

        Raises:
            Unclear: groups do not come back in order.
        """
        back = self._used() if early is None or not early.any() else self._with_forward(early)
        ends, entered = back
        late = (ends[1:] < ends[:-1]) | ((ends[1:] == ends[:-1]) & (entered[1:] < entered[:-1]))
        if late.any():
            raise Unclear
        found = np.zeros((len(self._steps), 2, self._m), dtype=np.int64)
        for way, (times, entries) in enumerate((self._copies(), self._turns("copy_grad", self._j + 1))):
            if times.size:
                found[:, way] = passed(*back, times.reshape(-1), entries.reshape(-1)).reshape(-1, self._m)
        return found

    def order(self, number: int) -> Integers:
        """Where each gradient of a step comes in among R, B and what is sent, task by task."""
        if self._j + 1 == self._n:
            return _NEVER.copy()
        numbers = self._steps[number].numbers
        first, tasks, sends = (
            numbers[kind][self._rows("backward", self._j), self._j] for kind in ("recompute", "backward", "copy_grad")
        )
        # Without a recomputation, and without anything to send, that turn is the one of the backward pass.
        ways = np.where(self._again, first, tasks), tasks, sends if self._j else tasks
        coming = numbers["copy_grad"][self._rows("copy_grad", self._j + 1), self._j + 1]
        place: Integers = np.searchsorted(np.stack(ways, axis=1).reshape(-1), coming)
        return place

    def _copies(self, into: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Times and entries of the copies into the partition, or into another one."""
        j = self._j if into is None else into
        if not j:
            return _NEVER, _NEVER
        return self._column("issue", "copy", j), self._entered("copy", j)

    def _used(self) -> tuple[Integers, Integers]:
        """When a task's inputs and gradients come back, and the entry of what brings that about."""
        issued, turns = self._tasks.reshape(-1), self._entries.reshape(-1)
        ends, entries = self._before("used")
        # A backward pass that is issued later finds that out in its own turn.
        late = (ends < issued) | ((ends == issued) & (entries < turns))
        return np.where(late, issued, ends), np.where(late, turns, entries)

    def _before(self, what: str) -> Moments:
        """Ends and entries of what was on a stream of each backward pass before it."""
        rows = self._rows("backward", self._j), self._j
        return Moments(*(np.concatenate([getattr(step, what)[edge][rows] for step in self._steps]) for edge in (0, 1)))

    def _with_forward(self, early: Flags) -> tuple[Integers, Integers]:
        """The same of forward passes, when inputs of some come back or have been passed on, and then of all tasks."""
        first = self._column("end", "forward", self._j), 2 * self._column("start", "forward", self._j)
        if early[:, 1].any():
            times, turns = self._copies(self._j + 1)
            later = (first[0] < times) | ((first[0] == times) & (first[1] < turns))
            sent = np.where(later, times, first[0]), np.where(later, turns, first[1])
        else:
            sent = first
        ends, entries = (
            np.concatenate(
                [
                    np.stack(both, axis=2).reshape(-1, 2 * self._m)[:, early.reshape(-1)],
                    then.reshape(-1, self._m),
                ],
                axis=1,
            ).reshape(-1)
            for *both, then in zip(first, sent, self._used(), strict=True)
        )
        return ends, entries

    def _ended(self, kind: str, j: int) -> Moments:
        """Ends and entries of copies into a partition, or of the gradients out of it, in the order of issue."""
        if not 0 < j < self._n:
            return Moments(_NEVER, _NEVER)
        return Moments(*(self._column(edge, kind, j).reshape(-1) << (edge == "start") for edge in ("end", "start")))

    def _turns(self, kind: str, j: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Times and entries of a kind of turn in the backward pass; nothing where there is no such partition."""
        if j == self._n:
            return _NEVER, _NEVER
        return self._column("issue", kind, j), self._entered(kind, j)

    def _entered(self, kind: str, j: int) -> Integers:
        return np.stack([step.entries[kind][self._rows(kind, j), j] for step in self._steps])

    def _rows(self, kind: str, j: int) -> slice:
        begin = j if kind in {"forward", "copy"} or kind.startswith("portal ") else self._n - 1 - j
        return slice(begin, begin + self._m)

    def _column(self, what: str, kind: str, j: int) -> Integers:
        rows = self._rows(kind, j)
        return np.stack([getattr(step, what)[kind][rows, j] for step in self._steps])
