"""What the clock in C is told: the forward program as rows does what the program does; both languages name the same."""

from __future__ import annotations

from itertools import product

import pytest

from gpipe_bench.components import Components
from gpipe_bench.results.timeline import KINDS as TIMELINE_KINDS
from gpipe_bench.schedules import KINDS as ACTION_KINDS
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.schedules.program import Plan, run_forward
from gpipe_bench.simulator.clock.program_rows import program_rows
from gpipe_bench.simulator.clock.shared import ACTIONS, KINDS, STEPS


class Noted:
    """Lanes that note what a program calls, with which task."""

    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        def note(i, j, skip=None, *, checkpoint=False):
            self.calls.append((name + "_checkpoint" * checkpoint, i, j, skip))

        return note


PHASES = (("join", "portal", "copy"), ("await_copy", "launch"), ("collect", "await_compute", "recompute", "fork"))


def expanded(plan):
    """The calls that rows stand for, as the clock repeats them."""
    rows, found = program_rows(plan), []
    for cycle in plan.cycles():
        for phase, (i, j) in product(PHASES, cycle):
            bits = rows["steps_of"][rows["sort_of"][i] * plan.n + j]
            steps = {name for name, place in STEPS.items() if bits & 1 << place}
            for name in phase:
                if name == "launch":
                    found.append((name + "_checkpoint" * ("checkpoint" in steps), i, j, None))
                elif name == "portal" and name in steps:
                    found += [(name, i, j, skip) for skip in plan.arrivals[j]]
                elif name == "collect" or name in steps:
                    found.append((name, i, j, None))
    return found


def same(plan):
    lanes = Noted()
    run_forward(plan, lanes)
    assert expanded(plan) == lanes.calls


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("components", list(Components.factorial()), ids=lambda one: one.label)
def test_rows_are_the_program(components, checkpoint):
    for m, n, backward in product((1, 2, 3, 5, 12), (1, 2, 4, 9), (True, False)):
        arrivals = {n - 1: [0, 2], 1: [1]} if n > 2 else {}
        same(Plan(m, n, components, checkpoint, arrivals, backward))


def test_both_languages_have_the_same_kinds():
    assert tuple(ACTIONS) == ACTION_KINDS
    assert KINDS == TIMELINE_KINDS
