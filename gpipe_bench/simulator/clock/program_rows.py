"""The forward program as arrays: what :mod:`gpipe_bench.schedules.program` does for a task, asked once per kind.

The steps of a task depend on its partition, and on whether its micro-batch is the first, is the last or has a
checkpoint. So the program runs for one micro-batch of each sort, and the clock repeats its steps for all others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from gpipe_bench.schedules import Action
from gpipe_bench.schedules.program import PHASES, Lanes, Plan
from gpipe_bench.simulator.clock.shared import STEPS


class _Steps:
    """Lanes that note the steps of a task, a bit each; every task is launched and collected."""

    noted = 0

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(self._note, name)

    def _note(self, name: str, *_: int, checkpoint: bool = False) -> None:
        step = "checkpoint" if checkpoint else name
        self.noted |= 1 << STEPS[step] if step in STEPS else 0


def program_rows(plan: Plan[int]) -> dict[str, Sequence[int]]:
    """The columns of the forward program, see ``table.h``; skips of ``plan`` are numbers."""
    return _rows(plan, [(i > 0, i < plan.m - 1, plan.checkpoints(i)) for i in range(plan.m)], partial(_steps, plan))


def cell_rows(plan: Plan[int], lists: Sequence[Sequence[Action]]) -> dict[str, Sequence[int]]:
    """The same columns where lists of actions run the forward passes: copies, and what is recomputed."""
    again: dict[int, set[int]] = {}
    for actions in lists:
        for _, i, j in (action for action in actions if action.kind == "R"):
            again.setdefault(i, set()).add(j)

    def steps(i: int, j: int) -> int:
        names = {
            "portal": plan.components.portals,
            "copy": j > 0,
            "checkpoint": plan.checkpoints(i) or j in again.get(i, ()),
        }
        return sum(1 << STEPS[name] for name, takes in names.items() if takes)

    return _rows(plan, [(plan.checkpoints(i), frozenset(again.get(i, ()))) for i in range(plan.m)], steps)


def _rows(plan: Plan[int], sorts: Sequence[object], steps: Callable[[int, int], int]) -> dict[str, Sequence[int]]:
    """The columns from the sort of each micro-batch, and from what gives the steps of a task."""
    first: dict[object, int] = {}
    for i, sort in enumerate(sorts):
        first.setdefault(sort, i)
    numbers = {sort: number for number, sort in enumerate(first)}
    found = (steps(i, j) for i in first.values() for j in range(plan.n))
    return {"sort_of": array("i", map(numbers.__getitem__, sorts)), "steps_of": array("i", found)}


def _steps(plan: Plan[int], i: int, j: int) -> int:
    lanes = _Steps()
    for phase in PHASES:
        phase(plan, cast(Lanes[int], lanes), i, j)
    return lanes.noted
