"""Shares of a step that the clock counts are those that its events add up to."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gpipe_bench.components import Components
from gpipe_bench.results.breakdown import Breakdown, split_device_time
from gpipe_bench.simulator.steps.run import Settings, run, step_events, step_uses
from tests.simulator.support import Plain, task, workload


@pytest.mark.parametrize("devices", [(0, 1, 2, 3), (3, 2, 0, 5), (0, 1, 1, 0)])
@pytest.mark.parametrize("label", ["dep-str-ptl", "baseline"])
@pytest.mark.parametrize("steps", [1, 2])
def test_shares_are_those_of_the_events(devices, label, steps):
    work = workload(12, [task(1000 + 100 * j, 2000 - 300 * j, 3) for j in range(4)], [(0, 2), (1, 3), (0, 3)])
    machine, chosen = Plain(copy=700, launch_ns=20, queue_depth=1024), Settings(Components.from_label(label))
    done = run(work, machine, Settings(chosen.components, devices=devices, steps=steps))
    events, length_ns = step_events(done)
    length_us = length_ns / 1e3
    used = sorted(set(devices))
    expected = split_device_time(events, [used.index(device) for device in devices], 0, length_us)
    for use, share in zip(step_uses(done, devices), expected, strict=True):
        names = Breakdown.__slots__
        assert [getattr(use, name) for name in names] == pytest.approx([getattr(share, name) for name in names])
        own = [event for event in events if event.device == f"cuda:{use.device}"]
        assert use.utilization_fraction == pytest.approx(_covered(own, length_us))


def _covered(events, length_us):
    """The share of a step in which one of the events runs."""
    instants = sorted({0.0, length_us, *(time for event in events for time in (event.start_us, event.end_us))})
    spans = [pair for pair in pairwise(instants) if pair[0] >= 0 and pair[1] <= length_us]
    busy = [pair for pair in spans if any(one.start_us <= pair[0] and pair[1] <= one.end_us for one in events)]
    return sum(end - start for start, end in busy) / length_us
