"""The turns at a partition that skips begin or end at; arrays are (steps, m), micro-batches ascending."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gpipe_bench.simulator.known_order.step_times import Integers, Step
from gpipe_bench.simulator.memory_states.come_backs import Moments

__all__ = ["Copy", "SkipTimes"]


class Copy(NamedTuple):
    """A kind of operation, and the partition that it is noted for."""

    kind: str
    at: int


class SkipTimes:
    """Times of a run whose order of issue is known.

    Args:
        steps: times of all devices, with numbers.
        m: micro-batches.
        n: partitions.
    """

    def __init__(self, steps: Sequence[Step], m: int, n: int) -> None:
        self.count = len(steps)
        self._steps, self._m, self._n = steps, m, n

    def numbers(self, copy: Copy) -> Integers:
        """Places in the order of all turns."""
        return self._column([step.numbers[copy.kind] for step in self._steps], copy)

    def turns(self, copy: Copy) -> Moments:
        """When they were issued."""
        entries = [step.entries[copy.kind] for step in self._steps]
        return Moments(self._column([step.issue[copy.kind] for step in self._steps], copy), self._column(entries, copy))

    def ends(self, copy: Copy) -> Moments:
        """When they ended."""
        starts, ends = ([getattr(step, what)[copy.kind] for step in self._steps] for what in ("start", "end"))
        return Moments(self._column(ends, copy), 2 * self._column(starts, copy))

    def used(self, j: int) -> Moments:
        """When what a compute stream had got before each backward pass had ended."""
        backward = Copy("backward", j)
        return Moments(*(self._column([step.used[edge] for step in self._steps], backward) for edge in (0, 1)))

    def _column(self, tables: Sequence[Integers], copy: Copy) -> Integers:
        m, n, (kind, at) = self._m, self._n, copy
        if kind in {"forward", "copy"} or kind.startswith("portal "):
            return np.stack([table[at : at + m, at] for table in tables])
        begin = n - 1 - at
        return np.stack([table[begin : begin + m, at][::-1] for table in tables])
