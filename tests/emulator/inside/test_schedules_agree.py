"""Schedules in the simulator against the engine's runtime on virtual devices: the same times."""

from __future__ import annotations

from itertools import product

import pytest

from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.simulator.steps.run import run
from gpipe_bench.simulator.steps.settings import Settings
from tests.cover import cover
from tests.emulator.inside.pipelines import BACKWARD_MS, DOUBLE, FORWARD_MS
from tests.emulator.inside.test_engine_time import MACHINE, ends
from tests.simulator.support import MS, task, workload


def simulated(name, m, devices, checkpoint, transfer):
    n = devices * (2 if name in DOUBLE else 1)
    work = workload(m, [task(round(FORWARD_MS * MS), round(BACKWARD_MS * MS), 2)] * n)
    chosen = Settings(checkpoint=checkpoint, schedule=name, transfer=transfer, memory=False)
    return run(work, MACHINE, chosen).makespan_ns / MS


@pytest.mark.parametrize(
    ("name", "checkpoint", "transfer", "m", "devices"),
    [
        (*chosen, *size)
        for *chosen, size in cover(product(SCHEDULES, CHECKPOINT_MODES, ("direct", "host"), ((1, 2), (3, 4), (8, 3))))
    ],
)
def test_a_schedule_takes_as_long_as_in_the_engine(name, checkpoint, transfer, m, devices):
    found = ends(name, m, devices, checkpoint, transfer)
    expected = simulated(name, m, devices, checkpoint, transfer)
    assert found == pytest.approx([expected] * len(found), rel=0, abs=1e-6)
