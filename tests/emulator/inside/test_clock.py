"""The virtual clock is exact on schedules that can be drawn by hand."""

from __future__ import annotations

import pytest
import torch

from gpipe_bench.emulator.library import devices, duration
from gpipe_bench.emulator.trace import Record, recording
from tests.emulator.bed.clock import simulate, ticking

FIRST, SECOND = devices(2)


def kernel(device, stream, milliseconds):
    return Record("kernel", "work", device, stream, duration=milliseconds)


def copy(device, stream, milliseconds, peer):
    return Record("copy", "device_to_device", device, stream, duration=milliseconds, peer=peer)


def record(device, stream, version):
    return Record("record", "", device, stream, version=version)


def wait(device, stream, version):
    return Record("wait", "", device, stream, version=version)


def spans(*records):
    timeline = simulate(records)
    return [
        (timeline.begin[index], timeline.end[index])
        for index, item in enumerate(records)
        if item.kind in ("kernel", "copy")
    ]


def test_a_stream_runs_in_order():
    assert spans(kernel(0, 0, 3), kernel(0, 0, 4)) == [(0, 3), (3, 7)]


def test_devices_run_at_the_same_time():
    assert spans(kernel(0, 0, 3), kernel(1, 0, 4)) == [(0, 3), (0, 4)]


def test_streams_of_a_device_share_its_compute_engine():
    assert spans(kernel(0, 0, 3), kernel(0, 1, 4)) == [(0, 3), (3, 7)]


def test_a_copy_runs_beside_kernels():
    assert spans(kernel(0, 0, 3), copy(0, 1, 4, 1), copy(0, 2, 5, 1)) == [(0, 3), (0, 4), (0, 5)]


def test_an_event_holds_a_stream_back():
    assert spans(kernel(0, 0, 3), record(0, 0, 1), kernel(0, 0, 9), wait(1, 0, 1), kernel(1, 0, 4)) == [
        (0, 3),
        (3, 12),
        (3, 7),
    ]


def test_the_engine_takes_what_is_ready_first_not_what_was_issued_first():
    #   device 1   7 ms ─┐                 the kernel issued first waits for device 1,
    #   device 0   s1    └ wait, 1 ms      the one issued last overtakes it
    #              s2    3 ms
    assert spans(kernel(1, 0, 7), record(1, 0, 1), wait(0, 1, 1), kernel(0, 1, 1), kernel(0, 2, 3)) == [
        (0, 7),
        (7, 8),
        (0, 3),
    ]


def test_of_two_that_are_ready_at_once_the_first_issued_goes_first():
    both = [kernel(1, 0, 2), record(1, 0, 1), wait(0, 2, 1), wait(0, 1, 1), kernel(0, 2, 5), kernel(0, 1, 1)]
    assert spans(*both) == [(0, 2), (2, 7), (7, 8)]


def test_what_takes_no_time_does_not_wait_for_the_engine():
    assert spans(kernel(0, 0, 3), kernel(0, 1, 0), record(0, 1, 1), wait(1, 0, 1), kernel(1, 0, 1))[1:] == [
        (0, 0),
        (0, 1),
    ]


@pytest.mark.parametrize(
    "sync",
    [Record("sync_stream", "", 0, 0), Record("sync_device", "", 0), Record("sync_event", version=1)],
    ids=lambda item: item.kind,
)
def test_after_a_synchronisation_the_host_goes_on(sync):
    assert spans(kernel(0, 0, 3), record(0, 0, 1), sync, kernel(1, 0, 4)) == [(0, 3), (3, 7)]


def test_synchronising_with_what_is_idle_costs_nothing():
    assert spans(kernel(0, 0, 3), Record("sync_stream", "", 0, 1), kernel(1, 0, 4))[1] == (0, 4)


def test_an_event_from_before_the_trace_has_happened():
    assert spans(wait(0, 0, 77), Record("sync_event", version=78), kernel(0, 0, 1)) == [(0, 1)]


def test_times_that_are_equal_on_paper_are_equal():
    tenths = simulate([kernel(0, 0, 0.1)] * 3)
    assert tenths.makespan == simulate([kernel(0, 0, 0.3)]).makespan == 0.3


def test_durations_by_name_by_function_and_by_the_host():
    records = [Record("kernel", "mul", 0), Record("kernel", "add", 0), Record("kernel", "mul", 0, duration=5)]
    assert simulate(records, {"mul": 2}).end == [2, 2, 7]
    assert simulate(records, lambda item: len(item.name)).end == [3, 6, 11]


def test_kernels_take_the_time_that_their_thread_says():
    x = torch.ones(2, device=FIRST)
    with recording() as trace:
        with duration(10):
            y = x + 1
            with duration(3):
                y.mul_(2)
        y.to(SECOND)
    assert simulate(trace.records, {"device_to_device": 0.5}).makespan == 13.5


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
    timeline = simulate(trace.records, {"device_to_device": 2})
    times = [timeline.end[index] for index, item in enumerate(trace.records) if item.kind in ("kernel", "copy")]
    assert times == [10, 12, 13, 13]


def test_timing_events_read_the_virtual_clock():
    x = torch.ones(2, device=SECOND)
    begin, end = (torch.Event("virtual", enable_timing=True) for _ in range(2))
    stream = torch.accelerator.current_stream(SECOND)
    with ticking({"mul": 4.0}):
        begin.record(stream)
        x * 2
        end.record(stream)
        end.synchronize()
        assert begin.elapsed_time(end) == 4.0
    with pytest.raises(RuntimeError, match="virtual clock"):
        begin.elapsed_time(end)
