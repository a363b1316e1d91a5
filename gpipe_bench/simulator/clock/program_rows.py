"""The forward program as arrays: what :mod:`gpipe_bench.program` does for a task, asked once for all tasks alike.

The steps of a task depend on its partition, and on whether its micro-batch is the first, is the last or has a
checkpoint. So the program runs for one micro-batch of each sort, and the clock repeats its steps for all others. The
order of tasks is that of :meth:`gpipe_bench.program.Plan.cycles`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import cast

from gpipe_bench.program import PHASES, Lanes, Plan
from gpipe_bench.simulator.clock.shared import STEP_BITS, STEPS

__all__ = ["program_rows"]


class _Steps:
    """Lanes that note their steps, whatever these are called."""

    def __init__(self) -> None:
        self.noted: list[int] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return partial(self._note, name)

    def _note(self, name: str, _i: int, _j: int, skip: int = 0, *, checkpoint: bool = False) -> None:
        self.noted.append(STEPS["launch_checkpoint" if checkpoint else name] | skip << STEP_BITS)


def program_rows(plan: Plan[int]) -> dict[str, Sequence[int]]:
    """The columns of the forward program, see ``table.h``; skips of ``plan`` are numbers."""
    sizes, tasks = array("i"), array("i")
    for cycle in plan.cycles():
        sizes.append(len(cycle))
        tasks.extend(chain.from_iterable(cycle))
    sorts = [(i > 0, i < plan.m - 1, plan.checkpoints(i)) for i in range(plan.m)]
    numbers = {sort: number for number, sort in enumerate(dict.fromkeys(sorts))}
    script, first = array("i"), array("i", [0])
    for sort in numbers:
        i = sorts.index(sort)
        known: dict[tuple[bool, bool, tuple[int, ...]], list[list[int]]] = {}
        for j in range(plan.n):
            key = (j > 0, j < plan.n - 1, tuple(plan.arrivals.get(j, ())))
            if key not in known:
                known[key] = _steps(plan, i, j)
            for steps in known[key]:
                script.extend(steps)
                first.append(len(script))
    return {
        "cycle_sizes": sizes,
        "cycle_tasks": tasks,
        "script_of": array("i", map(numbers.__getitem__, sorts)),
        "script_first": first,
        "script": script,
    }


def _steps(plan: Plan[int], i: int, j: int) -> list[list[int]]:
    """The steps of a task, phase by phase."""
    found = []
    for phase in PHASES:
        lanes = _Steps()
        phase(plan, cast(Lanes[int], lanes), i, j)
        found.append(lanes.noted)
    return found
