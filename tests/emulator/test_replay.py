"""The replay is exact on traces that can be drawn by hand: streams, engines, copies and waits of the host."""

from __future__ import annotations

import pytest

from gpipe_bench.machine.replay import replay
from gpipe_bench.machine.trace import Record, Trace
from tests.emulator.bed.rows import NS_PER_MS, Bed, passed_ns, traced

FREE = Bed()


def kernel(device, stream, milliseconds, **options):
    return Record("kernel", "work", device, stream, duration=milliseconds, **options)


def copy(device, peer, *, stream=0, peer_stream=0, **options):
    return Record("copy", "device_to_device", device, stream, peer=peer, peer_stream=peer_stream, **options)


def record(device, stream, version, **options):
    return Record("record", "", device, stream, version=version, **options)


def wait(device, stream, version, **options):
    return Record("wait", "", device, stream, version=version, **options)


def spans(*records, machine=FREE):
    """Begin and end of kernels and copies in milliseconds."""
    found = replay(traced(*records), machine)
    return [
        (found.begin_ns[place] / NS_PER_MS, found.end_ns[place] / NS_PER_MS)
        for place, item in enumerate(records)
        if item.kind in ("kernel", "copy")
    ]


def test_an_empty_trace_takes_no_time():
    found = replay(Trace(), FREE)
    assert (found.makespan_ns, passed_ns(found), found.marks) == (0, {}, [])


def test_a_stream_runs_in_order():
    assert spans(kernel(0, 0, 3), kernel(0, 0, 4)) == [(0, 3), (3, 7)]


def test_devices_run_at_the_same_time():
    assert spans(kernel(0, 0, 3), kernel(1, 0, 4)) == [(0, 3), (0, 4)]


def test_streams_of_a_device_share_its_compute_engine():
    assert spans(kernel(0, 0, 3), kernel(0, 1, 4)) == [(0, 3), (3, 7)]


def test_an_event_holds_a_stream_back():
    assert spans(kernel(0, 0, 3), record(0, 0, 1), kernel(0, 0, 9), wait(1, 0, 1), kernel(1, 0, 4)) == [
        (0, 3),
        (3, 12),
        (3, 7),
    ]


def test_an_event_waits_for_what_its_stream_waits_for():
    passed = [record(0, 0, 1), wait(1, 0, 1), record(1, 0, 2), wait(2, 0, 2), kernel(2, 0, 1)]
    assert spans(kernel(0, 0, 3), *passed) == [(0, 3), (3, 4)]


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
    first, second = kernel(0, 2, 5, launches=1), kernel(0, 1, 1, launches=1)
    both = [kernel(1, 0, 2), record(1, 0, 1), wait(0, 2, 1), wait(0, 1, 1), first, second]
    assert spans(*both, machine=Bed(launch_ns=1000)) == [(0, 2), (2, 7), (7, 8)]


def test_of_two_that_were_issued_at_one_time_that_of_the_lower_device_goes_first():
    rows = [copy(device, 2, stream=1, peer_stream=device, thread=device) for device in (0, 1)]
    assert spans(*rows, machine=Bed(2)) == [(0, 2), (2, 4)]
    assert spans(*rows[::-1], machine=Bed(2)) == [(2, 4), (0, 2)]


def test_an_engine_is_given_away_when_the_instant_is_over():
    # Devices 1 and 2 are done at one time; what waits for device 1 is ready first and was issued last.
    rows = [kernel(1, 0, 3), record(1, 0, 1), kernel(2, 0, 3), record(2, 0, 2)]
    rows += [wait(0, 1, 2), kernel(0, 1, 5), wait(0, 2, 1), kernel(0, 2, 1)]
    assert spans(*rows)[2:] == [(3, 8), (8, 9)]


def test_a_wait_keeps_the_order_of_the_waiting_stream():
    rows = [kernel(1, 0, 5), kernel(0, 0, 3), record(0, 0, 1), wait(1, 0, 1), kernel(1, 0, 4)]
    assert spans(*rows) == [(0, 5), (0, 3), (5, 9)]


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


def test_another_thread_goes_on_meanwhile():
    sync = Record("sync_stream", "", 0, 0)
    assert spans(kernel(0, 0, 3), sync, kernel(1, 0, 4, thread=1)) == [(0, 3), (0, 4)]


def test_a_synchronisation_holds_no_stream_back():
    rows = [kernel(0, 0, 3), Record("sync_device", "", 0), kernel(0, 1, 0, thread=1), kernel(1, 0, 1)]
    assert spans(*rows) == [(0, 3), (0, 0), (3, 4)]


def test_synchronising_with_what_is_idle_costs_nothing():
    assert spans(kernel(0, 0, 3), Record("sync_stream", "", 0, 1), kernel(1, 0, 4))[1] == (0, 4)


def test_an_event_from_before_the_trace_has_happened():
    assert spans(wait(0, 0, 77), Record("sync_event", version=78), kernel(0, 0, 1)) == [(0, 1)]


@pytest.mark.parametrize("versions", [(5, 6, 7), (1, 3, 4), (2, 3, 9), (2, 50, 10**15)])
def test_events_are_found_by_versions_with_gaps_and_without(versions):
    rows = [row for version in versions for row in (kernel(0, 0, 2), record(0, 0, version))]
    for place, version in enumerate(versions, 1):
        assert spans(*rows, wait(1, 0, version), kernel(1, 0, 1))[-1] == (2 * place, 2 * place + 1)
    for version in {*range(11), 51, 2 * 10**15} - {*versions}:
        assert spans(*rows, wait(1, 0, version), kernel(1, 0, 1))[-1] == (0, 1)


def test_events_pass_when_their_stream_comes_to_them():
    found = replay(traced(record(0, 0, 1), kernel(0, 0, 3), record(0, 0, 2), record(1, 0, 3)), FREE)
    assert passed_ns(found) == {1: 0, 2: 3 * NS_PER_MS, 3: 0}


def test_a_mark_is_when_all_before_it_has_ended():
    rows = [kernel(0, 0, 3), kernel(1, 0, 5), Record("mark", version=8), kernel(0, 0, 4), Record("mark", version=9)]
    assert replay(traced(*rows), FREE).marks == [5 * NS_PER_MS, 7 * NS_PER_MS]


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_meets_both_streams():
    rows = [kernel(1, 0, 10), copy(0, 1), kernel(0, 0, 1), kernel(1, 0, 1)]
    assert spans(*rows, machine=Bed(2)) == [(0, 10), (10, 12), (12, 13), (12, 13)]


def test_a_copy_runs_beside_kernels():
    rows = [kernel(0, 0, 3), kernel(1, 0, 3), copy(0, 1, stream=1, peer_stream=1)]
    assert spans(*rows, machine=Bed(2)) == [(0, 3), (0, 3), (0, 2)]


@pytest.mark.parametrize(
    ("second", "begins"),
    [((0, 2), 2), ((2, 1), 2), ((1, 0), 0), ((2, 3), 0)],
    ids=["one sender", "one receiver", "the other way", "others"],
)
def test_a_device_has_one_engine_that_sends_and_one_that_receives(second, begins):
    rows = [copy(0, 1, stream=1, peer_stream=1), copy(*second, stream=2, peer_stream=2)]
    assert spans(*rows, machine=Bed(2)) == [(0, 2), (begins, begins + 2)]


def test_copies_between_other_devices_take_turns_on_a_shared_bus():
    rows = [copy(0, 1, stream=1, peer_stream=1), copy(2, 3, stream=2, peer_stream=2)]
    both = Bed(2, shared=lambda source, target: ((0, 0),))
    assert spans(*rows, machine=both) == [(0, 2), (2, 4)]
    apart = Bed(2, shared=lambda source, target: ((source, target),))
    assert spans(*rows, machine=apart) == [(0, 2), (0, 2)]


def test_a_copy_takes_turns_on_both_of_its_buses():
    rows = [copy(0, 2), copy(3, 5, duration=3), copy(1, 4)]
    cards = Bed(2, shared=lambda source, target: ((source // 2, -1), (-1, target // 2)))
    assert spans(*rows, machine=cards) == [(0, 2), (0, 3), (3, 5)]


@pytest.mark.parametrize("far", [1, 2**16])
def test_a_shared_bus_is_that_of_both_devices_whatever_their_numbers(far):
    asked = []
    machine = Bed(2, shared=lambda *ends: asked.append(ends) or ((0, 0),))
    rows = [copy(far, 0), copy(0, far, stream=1, peer_stream=1)]
    assert spans(*rows, machine=machine) == [(2, 4), (0, 2)]
    assert asked == [(far, 0), (0, far)]


def test_copies_with_the_host_use_the_engines_of_their_way():
    down = Record("copy", "device_to_host", 0, 1)
    up = Record("copy", "host_to_device", 0, 2)
    assert spans(down, up, copy(0, 1, stream=3), machine=Bed(2)) == [(0, 1), (0, 1), (1, 3)]


# --- launches --------------------------------------------------------------------------------------------------------

MS = Bed(launch_ns=NS_PER_MS)


def test_launches_cost_the_host_time():
    rows = [kernel(0, 0, 5, launches=2), kernel(1, 0, 1, launches=1), kernel(2, 0, 1)]
    assert spans(*rows, machine=MS) == [(0, 5), (2, 3), (3, 4)]


def test_a_kernel_cannot_end_before_it_is_issued():
    assert spans(kernel(0, 0, 1, launches=3), kernel(0, 0, 1, launches=1), machine=MS) == [(0, 3), (3, 4)]


def test_the_host_may_cost_nothing():
    rows = traced(*(kernel(0, 0, 1, launches=3) for _ in range(9)))
    assert replay(rows, Bed(launch_ns=NS_PER_MS, queue_depth=2), host_time=False).host_ns.tolist() == [0] * 9


def test_an_update_keeps_its_device_and_the_host():
    rows = [kernel(0, 0, 1, launches=1), Record("update", "", 0, 0, duration=4), kernel(0, 0, 1, launches=1)]
    found = replay(traced(*rows, kernel(1, 0, 1, launches=1)), MS)
    assert [time // NS_PER_MS for time in found.host_ns] == [0, 1, 5, 6]
    assert [time // NS_PER_MS for time in found.end_ns] == [1, 5, 6, 7]
    assert (found.trace.updating_ns(), found.trace.sums("duration_ns")[0]) == (4 * NS_PER_MS, 2 * NS_PER_MS)
    assert replay(traced(*rows), MS, host_time=False).makespan_ns == 2 * NS_PER_MS


def test_a_node_that_keeps_a_gradient_costs_a_launch_of_its_device():
    rows = [Record("node", nbytes=7, writes=(1,), peer=1, launches=1), kernel(1, 0, 1, launches=1)]
    found = replay(traced(*rows), MS)
    assert [time // NS_PER_MS for time in found.host_ns] == [0, 1]
    assert found.trace.sums("launches") == {1: 2}


def test_the_host_waits_while_the_launch_queue_is_full():
    found = replay(traced(*(kernel(0, 0, 5, launches=1) for _ in range(5))), Bed(launch_ns=NS_PER_MS, queue_depth=2))
    # The third launch leaves when the first one has run, and so on.
    assert [time // NS_PER_MS for time in found.host_ns] == [0, 1, 2, 5, 10]
    assert found.makespan_ns == 25 * NS_PER_MS


def test_another_stream_has_a_launch_queue_of_its_own():
    rows = [*(kernel(0, 0, 5, launches=1) for _ in range(2)), *(kernel(0, 1, 5, launches=1) for _ in range(2))]
    found = replay(traced(*rows), Bed(launch_ns=NS_PER_MS, queue_depth=2))
    assert [time // NS_PER_MS for time in found.host_ns] == [0, 1, 2, 3]


def test_launches_that_have_run_leave_room_though_the_next_ones_wait():
    #   device 0   1 ms │ the host waits; then wait for device 1, 1 ms      four launches each, of which four fit in
    #   device 1   9 ms
    rows = [kernel(1, 0, 9), record(1, 0, 1), kernel(0, 0, 1, launches=4), Record("sync_stream", "", 0, 0)]
    rows += [wait(0, 0, 1), kernel(0, 0, 1, launches=4), kernel(2, 0, 0)]
    found = replay(traced(*rows), Bed(queue_depth=4))
    assert found.host_ns[-1] == NS_PER_MS


@pytest.mark.parametrize(
    ("launches", "nanoseconds", "room"), [(4, 40, 0), (5, 50, 10), (6, 60, 20), (8, 80, 40), (5, 14, 3), (7, 10, 5)]
)
def test_the_queue_has_room_when_so_many_kernels_of_a_row_have_run(launches, nanoseconds, room):
    # Four launches fit in.
    rows = [kernel(0, 0, nanoseconds / NS_PER_MS, launches=launches), kernel(0, 0, 0)]
    assert replay(traced(*rows), Bed(queue_depth=4)).host_ns.tolist() == [0, room]
