"""The forward program as arrays: what :mod:`gpipe_bench.program` does for a task, asked once for all tasks alike.

The steps of a task depend on its partition, and on whether its micro-batch is the first, is the last or has a
checkpoint. So the program runs for one micro-batch of each sort, and the clock repeats its steps for all others.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from gpipe_bench.program import PHASES, Lanes, Plan
from gpipe_bench.simulator.clock.shared import STEPS

__all__ = ["program_rows"]


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
    sorts = [(i > 0, i < plan.m - 1, plan.checkpoints(i)) for i in range(plan.m)]
    numbers = {sort: number for number, sort in enumerate(dict.fromkeys(sorts))}
    steps = array("i")
    for sort in numbers:
        known: dict[tuple[bool, bool, bool], int] = {}
        for j in range(plan.n):
            key = (j > 0, j < plan.n - 1, bool(plan.arrivals.get(j)))
            if key not in known:
                known[key] = _steps(plan, sorts.index(sort), j)
            steps.append(known[key])
    return {"sort_of": array("i", map(numbers.__getitem__, sorts)), "steps_of": steps}


def _steps(plan: Plan[int], i: int, j: int) -> int:
    """The steps of a task."""
    lanes = _Steps()
    for phase in PHASES:
        phase(plan, cast(Lanes[int], lanes), i, j)
    return lanes.noted
