"""The use of virtual devices: what ran within a step."""

from __future__ import annotations

from gpipe_bench.emulator.observer import busy_devices
from gpipe_bench.results.timeline import TimelineEvent


def test_what_ran_before_or_after_the_step_is_no_use_of_it():
    """As with zb_h2, where the first device does not wait for the end of a step."""
    spans = [(-30.0, -10.0), (-5.0, 5.0), (40.0, 50.0), (95.0, 110.0), (120.0, 130.0)]
    events = [TimelineEvent("cuda:0", "compute", "forward", i, 0, 0.0, *span, 0) for i, span in enumerate(spans)]
    (busy,) = busy_devices(events, [0], 100.0)
    assert busy.occupied_ns == 20_000
