"""Streams and engines in virtual time, on schedules that can be drawn by hand."""

from __future__ import annotations

import pytest

from tests.simulator.oracle.clock import Clock


def spans(*steps, engines=3, depth=0):
    """When operations ran: steps are (streams, duration, engines), or (waiter, awaited)."""
    clock = Clock(8, engines, depth)
    operations = []

    def host():
        for step in steps:
            if len(step) == 2:
                clock.wait(*step)
            else:
                streams, duration, used = step
                operations.append(clock.issue(streams, duration, engines=used, launches=1, host_ns=0))
        yield 0

    clock.resume(host())
    clock.run()
    return [(operation.start, operation.end) for operation in operations]


def test_a_stream_runs_in_order():
    assert spans(((0,), 3, ()), ((0,), 4, ())) == [(0, 3), (3, 7)]


def test_streams_run_side_by_side():
    assert spans(((0,), 3, (0,)), ((1,), 4, (1,))) == [(0, 3), (0, 4)]


def test_streams_of_a_device_share_its_engine():
    assert spans(((0,), 3, (0,)), ((1,), 4, (0,))) == [(0, 3), (3, 7)]


def test_an_operation_on_two_streams_is_a_barrier_both_ways():
    #   stream 0   3 ms ──┐   ┌ 1 ms
    #                     2 ms
    #   stream 1   5 ms ──┘   └ 4 ms
    steps = [((0,), 3, ()), ((1,), 5, ()), ((0, 1), 2, ()), ((0,), 1, ()), ((1,), 4, ())]
    assert spans(*steps) == [(0, 3), (0, 5), (5, 7), (7, 8), (7, 11)]


def test_a_stream_waits_for_what_was_issued_before_and_not_after():
    assert spans(((0,), 3, ()), (1, 0), ((0,), 9, ()), ((1,), 4, ())) == [(0, 3), (3, 12), (3, 7)]


def test_waiting_is_passed_on_even_without_an_operation_between():
    assert spans(((0,), 3, ()), (1, 0), (2, 1), ((2,), 4, ())) == [(0, 3), (3, 7)]


def test_a_wait_keeps_the_order_of_the_waiting_stream():
    assert spans(((1,), 5, ()), ((0,), 3, ()), (1, 0), ((1,), 4, ())) == [(0, 5), (0, 3), (5, 9)]


def test_the_engine_takes_what_is_ready_first_not_what_was_issued_first():
    steps = [((0,), 7, (1,)), (1, 0), ((1,), 1, (0,)), ((2,), 3, (0,)), ((3,), 6, (0,))]
    assert spans(*steps) == [(0, 7), (9, 10), (0, 3), (3, 9)]


def test_of_two_that_were_issued_at_one_time_that_of_the_lower_stream_goes_first():
    steps = [((0,), 2, (1,)), (2, 0), (1, 0), ((2,), 5, (0,)), ((1,), 1, (0,))]
    assert spans(*steps) == [(0, 2), (3, 8), (2, 3)]


def test_a_copy_needs_both_of_its_engines():
    #   engine 0   3 ms │ 4 ms          the second needs both, the third only engine 1
    #   engine 1   2 ms │ …  4 ms
    steps = [((0,), 3, (0,)), ((1,), 4, (0, 1)), ((2,), 2, (1,))]
    assert spans(*steps) == [(0, 3), (3, 7), (0, 2)]


def test_what_takes_no_time_does_not_wait_for_the_engine():
    assert spans(((0,), 3, (0,)), ((1,), 0, (0,))) == [(0, 3), (0, 0)]


def test_nothing_ends_before_the_host_has_issued_it():
    clock = Clock(1, 1)
    operation = clock.issue((0,), 3, engines=(0,), launches=10, host_ns=50)
    assert clock.run() == 50
    assert (operation.start, operation.end) == (0, 50)


@pytest.mark.parametrize(("launched", "full_until"), [(4, 0), (5, 10), (6, 20), (8, 40)])
def test_the_launch_queue_has_room_when_so_many_kernels_have_run(launched, full_until):
    # Kernels of 10 ns, four of which fit into the queue.
    clock = Clock(1, 1, queue_depth=4)
    waits = []

    def host():
        operation = clock.issue((0,), 10 * launched, engines=(0,), launches=launched, host_ns=0)
        if clock.full_until(0) is operation:
            clock.after_start(operation, clock.current)
            yield None
        waits.append(clock.full_until(0))

    clock.resume(host())
    clock.run()
    assert waits == [full_until]
