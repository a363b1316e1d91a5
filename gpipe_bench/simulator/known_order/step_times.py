"""The times of one training step as arrays, by clock-cycle and partition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpipe_bench.simulator.known_order.tables import Integers
from gpipe_bench.simulator.known_order.turns import Turns

__all__ = ["COMPUTATIONS", "KINDS", "Span", "Step"]

COMPUTATIONS: Final = ("forward", "recompute", "backward")
KINDS: Final = (*COMPUTATIONS, "copy", "copy_grad")


class Span(NamedTuple):
    """When an operation began, and when it ended."""

    start: int
    end: int


@dataclass(slots=True)
class Step:
    """The times of one step by kind, each (m+n-1, n): by cycle and partition; -1 where there is no such task.

    Attributes:
        issue: when a host thread issued it.
        start: when it began.
        end: when it ended.
        turns: the turns of the host threads in the backward pass.
        loss: when the calling thread came to the loss.
        last: what the last compute stream ran before the backward pass.
        update: when it was through with the update, and its entry; see :mod:`gpipe_bench.simulator.known_order.turns`.
        used: when what was on the stream of a backward pass before it had ended, and its entry; where copies of other
            micro-batches may be among that, else empty.
        shared: the same of its copy stream.
        numbers: places of turns in the order of all, by kind, where that is known.
    """

    issue: dict[str, Integers] = field(default_factory=dict)
    start: dict[str, Integers] = field(default_factory=dict)
    end: dict[str, Integers] = field(default_factory=dict)
    turns: Turns | None = None
    loss: int = 0
    last: Span = field(default_factory=lambda: Span(0, 0))
    update: tuple[int, int] = (0, 0)
    used: list[Integers] = field(default_factory=list)
    shared: list[Integers] = field(default_factory=list)
    numbers: dict[str, Integers] = field(default_factory=dict)

    def note(self, kind: str, part: tuple[int, slice], issue: Integers, span: tuple[Integers, Integers]) -> None:
        """Enter the times of one cycle's tasks: ``part`` is the cycle and its partitions, ``span`` start and end."""
        self.issue[kind][part] = issue
        self.start[kind][part], self.end[kind][part] = span
