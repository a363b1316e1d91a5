"""The clock in C gives what the clock in Python gives: issue, start and end of every task, order, and memory."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gpipe_bench.choices import CHECKPOINT_MODES, FLAVOURS
from gpipe_bench.components import Components
from gpipe_bench.schedules import SCHEDULES, Schedule
from gpipe_bench.simulator.clock.settings import Settings
from tests.cover import cover
from tests.simulator.against_oracle import same
from tests.simulator.digests.groups import CASES
from tests.simulator.support import Plain, task, workload
from tests.simulator.test_lives import heavy

MACHINE = Plain(copy=300, launch_ns=20, queue_depth=1024)
SIZES = ((1, 3), (2, 4), (4, 5), (3, 34), (6, 2))
SKIPS = ((0, 1), (0, 3), (1, 2), (2, 3))


def chain(n, m, skips=()):
    tasks = [heavy(forward=1000 + 37 * j, backward=2000 + 11 * j, launches=3, nodes=2) for j in range(n)]
    # Blocks of tasks are named without skips.
    return workload(m, [replace(one, leaving=()) if skips else one for one in tasks], skips)


@pytest.mark.parametrize(("flavour", "mode"), [*product(FLAVOURS, CHECKPOINT_MODES)])
def test_chains_with_every_combination(flavour, mode):
    for (n, m), components, memory in cover(product(SIZES, Components.factorial(), (False, True))):
        same(chain(n, m), MACHINE, Settings(components, mode, flavour=flavour, steps=2, memory=memory))


@pytest.mark.parametrize(("flavour", "mode"), [*product(FLAVOURS, CHECKPOINT_MODES)])
def test_skips_with_every_combination(flavour, mode):
    for components in Components.factorial():
        same(chain(4, 5, SKIPS), MACHINE, Settings(components, mode, flavour=flavour, steps=2))


VARIANTS = {
    "staged": {"transfer": "host"},
    "shared": {"devices": (0, 0, 1, 1)},
    "shared and staged": {"devices": (0, 1, 0, 1), "transfer": "host"},
    "without streams": {"streams": False},
    "without workers": {"workers": False},
    "equal latencies": {"seed": None, "flavour": "published"},
}


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, mode):
    for early, portals, depth in product((True, False), (True, False), (0, 4, 9)):
        chosen = Settings(Components(early_recompute=early, portals=portals), mode, steps=3, **VARIANTS[variant])
        same(chain(4, 6, SKIPS), replace(MACHINE, queue_depth=depth), chosen)


def test_what_takes_no_time():
    for components in Components.factorial():
        same(workload(4, [task(0, 0, 0)] * 3, [(0, 2)]), Plain(copy=0), Settings(components))


PLACES = {
    "own": {},
    "staged": {"transfer": "host"},
    "without streams": {"streams": False},
    "without workers": {"workers": False, "transfer": "host"},
}


@pytest.mark.parametrize("mode", CHECKPOINT_MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule, mode):
    switches = (Components(), Components(portals=False), Components(early_recompute=False))
    sizes = ((2, 4), (4, 3), (6, 5))
    for (n, m), where, components, skips in cover(product(sizes, PLACES, switches, (False, True)), together=3):
        chosen = Settings(components, mode, schedule=schedule, steps=2, **PLACES[where])
        if skips:
            same(chain(n, m, [(0, n - 1), (n - 2, n - 1)]), replace(MACHINE, queue_depth=9), chosen)
        else:
            same(chain(n, m), MACHINE, chosen)


def test_a_schedule_of_ones_own_with_recomputations_where_it_wants_them():
    lists = [["F00", "F10", "R00", "B00", "R10", "B10"], ["F01", "B01", "F11", "R11", "B11"]]
    schedule = Schedule.of([[(kind, int(i), int(j)) for kind, i, j in actions] for actions in lists])
    for memory in (False, True):
        same(chain(2, 2), MACHINE, Settings(checkpoint="always", schedule=schedule, memory=memory))


@pytest.mark.parametrize("group", [name for name in CASES if name.startswith("random")])
def test_random_runs(group):
    for case in list(CASES[group]())[:60]:
        same(case.workload, case.machine, case.settings)
