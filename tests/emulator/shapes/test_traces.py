"""Traces of emulated steps: Perfetto draws all of their slices."""

from __future__ import annotations

import pytest

from gpipe_bench.emulator import emulate
from gpipe_bench.results.timeline import chrome_trace
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.step.request import Model
from tests.overlaps import partial_overlaps

UNET = Model("unet", {"B": 1, "C": 8, "depth": 2, "size": 32})


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_of_every_schedule(schedule):
    step = emulate(UNET, balance=[7, 7, 7, 8], batch_size=16, chunks=8, schedule=schedule, profile="p40")
    assert step.events
    assert partial_overlaps(chrome_trace(step.events, title="one step", metadata={})) == []
