"""Schedules in the simulator against the engine's runtime on virtual devices: the same times."""

from __future__ import annotations

import pytest

from gpipe_bench.schedule import CHECKPOINT_MODES
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.simulator.clock.run import run_on_clock
from gpipe_bench.simulator.clock.settings import Settings
from tests.emulator.inside.pipelines import BACKWARD_MS, COPY_MS, DOUBLE, FORWARD_MS
from tests.emulator.inside.test_engine_time import ends
from tests.emulator.inside.test_simulator_agrees import Bed
from tests.simulator.support import MS, task, workload


def simulated(name, m, devices, checkpoint, transfer):
    n = devices * (2 if name in DOUBLE else 1)
    work = workload(m, [task(round(FORWARD_MS * MS), round(BACKWARD_MS * MS), 2)] * n)
    chosen = Settings(checkpoint=checkpoint, schedule=name, transfer=transfer, memory=False)
    return run_on_clock(work, Bed(), chosen).result.makespan_ns / MS


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_takes_as_long_as_in_the_engine(name, checkpoint, transfer):
    """Copies of two partitions on one device that set out at one time take turns in the simulation alone."""
    apart = COPY_MS + 1e-6 if name in DOUBLE else None
    for m, devices in ((1, 2), (3, 4), (8, 3)):
        found, expected = (
            ends(name, m, devices, checkpoint, transfer=transfer),
            (name, m, devices, checkpoint, transfer),
        )
        assert found == pytest.approx([simulated(*expected)] * len(found), abs=apart), (m, devices)
