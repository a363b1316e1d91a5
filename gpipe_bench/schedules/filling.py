"""Weights' gradients fill the bubbles: where each W goes when F and I have their order."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from gpipe_bench.schedules.actions import Action, Schedule

__all__ = ["fill"]


def fill(rows: Iterable[Sequence[Action]], limit: int) -> Schedule:
    """Put W into the lists of F and I: while a device waits, and where it would hold too many activations.

    Time is counted in steps of T_F = T_B = T_W = 1. In each step a device takes its next F or I if what that needs has
    ended and, for F, if it holds fewer than ``limit`` activations. Otherwise it takes the oldest W that it still owes.
    Zero Bubble (arXiv 2401.10241, section 3.1) places W by such a rule.

    Args:
        rows: for each device its F and I, in order.
        limit: of forward passes whose W has not ended, on each device.
    """
    waiting = [deque(row) for row in rows]
    owed: list[deque[Action]] = [deque() for _ in waiting]
    filled: list[list[Action]] = [[] for _ in waiting]
    held = [0] * len(waiting)
    n = 1 + max(action.j for row in waiting for action in row)
    ended: set[Action] = set()
    while any(waiting) or any(owed):
        step = []
        for device, (row, later) in enumerate(zip(waiting, owed, strict=True)):
            full = held[device] >= limit
            if row and _ready(row[0], n, ended) and not (full and row[0].kind == "F"):
                step.append((device, row.popleft()))
            elif later:
                step.append((device, later.popleft()))
        if not step:
            raise AssertionError(f"limit {limit} is too small for these lists")
        for device, action in step:
            ended.add(action)
            filled[device].append(action)
            held[device] += (action.kind == "F") - (action.kind == "W")
            if action.kind == "I":
                owed[device].append(Action("W", action.i, action.j))
    return Schedule(tuple(map(tuple, filled)))


def _ready(action: Action, n: int, ended: set[Action]) -> bool:
    """Whether the pass before it, of the same kind, has ended; the F of an I is before it in the list of its device."""
    kind, i, j = action
    before = j - 1 if kind == "F" else j + 1
    return not 0 <= before < n or (kind, i, before) in ended
