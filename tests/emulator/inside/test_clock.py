"""On virtual devices, the virtual clock is exact on what can be drawn by hand."""

from __future__ import annotations

import pytest
import torch

from gpipe_bench.emulator.library import devices
from gpipe_bench.emulator.recording import recording
from gpipe_bench.machine.replay import replay
from tests.emulator.bed.behaviour import duration
from tests.emulator.bed.rows import NS_PER_MS, Bed
from tests.emulator.bed.ticking import ticking
from tests.emulator.inside.pipelines import run_ends

FIRST, SECOND = devices(2)


def test_kernels_take_the_time_that_their_thread_says():
    x = torch.ones(2, device=FIRST)
    with recording() as trace:
        with duration(10):
            y = x + 1
            with duration(3):
                y.mul_(2)
        y.to(SECOND)
    assert replay(trace, Bed(0.5)).makespan_ns == 13.5 * NS_PER_MS


def test_a_copy_stalls_the_receiver_on_its_current_stream():
    # The barrier of a copy on the default streams: it starts when the receiver is free, who goes on when it is there.
    x, y = torch.ones(2, device=FIRST), torch.ones(2, device=SECOND)
    with recording() as trace:
        with duration(10):
            y + 1
        x.to(SECOND)
        with duration(1):
            x + 1
            y + 1
    assert run_ends(trace, Bed(2)) == [10, 12, 13, 13]


def test_timing_events_read_the_virtual_clock():
    x = torch.ones(2, device=SECOND)
    begin, end = (torch.Event("virtual", enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream(SECOND)
    with ticking(Bed()):
        begin.record(stream)
        with duration(4):
            x * 2
        end.record(stream)
        end.synchronize()
        assert begin.elapsed_time(end) == 4.0
        with duration(2):
            x * 2
        end.record(stream)
        end.synchronize()
        assert begin.elapsed_time(end) == 6.0
    with pytest.raises(RuntimeError, match="virtual clock"):
        begin.elapsed_time(end)
