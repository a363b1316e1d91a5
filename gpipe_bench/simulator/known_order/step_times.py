"""The times of one training step as arrays, by clock-cycle and partition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

__all__ = ["COMPUTATIONS", "Flags", "Integers", "Step"]

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

COMPUTATIONS: Final = ("forward", "recompute", "backward")


@dataclass(slots=True)
class Step:
    """The times of one step by kind, each (m+n-1, n): by cycle and partition; -1 where there is no such task.

    Attributes:
        issue: when a host thread issued it.
        entries: of the turn in which it did, see :mod:`gpipe_bench.simulator.known_order.turns`.
        numbers: its place in the order of all that was issued.
        start: when it began.
        end: when it ended.
        loss: when the calling thread came to the loss.
        update: when it was through with the update, and its entry.
        used: when what was on the stream of a backward pass before it had ended, and its entry.
        shared: the same of its copy stream.
    """

    issue: dict[str, Integers] = field(default_factory=dict)
    entries: dict[str, Integers] = field(default_factory=dict)
    numbers: dict[str, Integers] = field(default_factory=dict)
    start: dict[str, Integers] = field(default_factory=dict)
    end: dict[str, Integers] = field(default_factory=dict)
    loss: int = 0
    update: tuple[int, int] = (0, 0)
    used: list[Integers] = field(default_factory=list)
    shared: list[Integers] = field(default_factory=list)
