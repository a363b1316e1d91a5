"""Shares of a step that the clock counts are those that its events add up to."""

from __future__ import annotations

import pytest

from gpipe_bench.components import Components
from gpipe_bench.simulator.runs.events import Settings, run
from gpipe_bench.simulator.runs.simulation import _added_up, _counted, step_events
from tests.simulator.support import Plain, task, workload


@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (3, 2, 0, 5), (0, 1, 1, 0)])
@pytest.mark.parametrize("label", ["dep-str-ptl", "baseline"])
@pytest.mark.parametrize("steps", [1, 2])
def test_counted_or_added_up(devices, label, steps):
    work = workload(12, [task(1000 + 100 * j, 2000 - 300 * j, 3) for j in range(4)], [(0, 2), (1, 3), (0, 3)])
    machine, chosen = Plain(copy=700, launch_ns=20, queue_depth=1024), Settings(Components.from_label(label))
    done = run(work, machine, Settings(chosen.components, devices=devices, steps=steps))
    asked = *step_events(done), devices
    (shares, busy), (expected_shares, expected_busy) = _counted(*asked), _added_up(*asked)
    assert busy == pytest.approx(expected_busy)
    names = shares[0].__slots__
    for share, expected in zip(shares, expected_shares, strict=True):
        assert [getattr(share, name) for name in names] == pytest.approx([getattr(expected, name) for name in names])
