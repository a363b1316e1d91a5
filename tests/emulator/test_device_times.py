"""What devices do in a window of virtual time."""

from __future__ import annotations

import pytest

from gpipe_bench.emulator.device_times import device_times, operator_times
from gpipe_bench.machine.replay import replay
from gpipe_bench.machine.trace import Record
from tests.emulator.bed.rows import NS_PER_MS, Bed, traced


@pytest.mark.parametrize(("milliseconds", "share"), [(1, 0.25), (4, 1.0), (8, 1.0)])
def test_a_device_is_idle_while_kernels_shorter_than_their_launches_are_launched(milliseconds, share):
    trace = traced(*[Record("kernel", "work", 0, duration=milliseconds, launches=1)] * 5)
    found = replay(trace, Bed(launch_ns=4 * NS_PER_MS))
    window = (0, found.makespan_ns)
    (use,) = device_times(trace.records, found.begin_ns, found.end_ns, window, 1)
    assert (use.kernel_fraction, use.copy_fraction, use.idle_fraction) == (share, 0, 1 - share)
    assert operator_times(trace.records, found.begin_ns, found.end_ns, window) == [("work", 5 * milliseconds, 5)]
