"""Turns and launches of one nanosecond, one by one: what is said of them, and where nothing can be said."""

from __future__ import annotations

import numpy as np
import pytest

from gpipe_bench.simulator.known_order.tables import LaunchQueue, Tables
from gpipe_bench.simulator.known_order.turns import Turns, Unclear
from gpipe_bench.simulator.workloads.workload import Kernels
from tests.simulator.support import Plain, task, workload

N = 3
NOBODY = np.array([False] * N)


def numbers(*values):
    return np.array(values, dtype=np.int64)


def begun(first=(50, 50, 50), done=(40, 30, 20)):
    """Turns of a cycle of all partitions whose first turns have come; all go on by themselves."""
    turns = Turns((9, N))
    turns.first(1, slice(0, N), numbers(*first), numbers(*done))
    return turns


def test_neighbours_that_are_woken_at_one_time_keep_their_order():
    # A thread that was through before the next one is woken by it, at the time of its turn.
    turns = begun(done=(10, 20, 30))
    assert turns.entries["recompute"][1].tolist() == [100, 100, -1]
    turns.send(numbers(60, 60, 60), numbers(100, 100, 102))
    assert turns.ahead[1].tolist() == [False, False, True]


def test_whoever_goes_on_by_itself_is_first():
    turns = begun(done=(10, 30, 30))
    # The second was through with the third, but before it in the order of turns.
    assert turns.entries["recompute"][1].tolist() == [100, 100, -1]
    turns.send(numbers(60, 60, 55), numbers(100, 100, 100))
    assert turns.ahead[1].tolist() == [False, True, True]


def test_the_earlier_entry_of_one_time_goes_first():
    turns = begun()
    turns.send(numbers(60, 60, 60), numbers(104, 102, 104))
    assert turns.ahead[1].tolist() == [True, False, True]


def test_after_a_start_it_is_not_known_who_goes_first():
    turns = begun()
    turns.backward(numbers(60, 60, 60), numbers(100, 100, 102), ~NOBODY)
    with pytest.raises(Unclear):
        turns.send(numbers(70, 70, 70), numbers(121, 121, 122))
    # Unless their times differ.
    turns.send(numbers(70, 71, 70), numbers(121, 121, 122))


def test_who_recomputes_and_who_does_not_have_not_come_to_the_same():
    turns = begun(first=(50, 50, 50), done=(10, 20, 30))
    entries = turns.entries["recompute"][1]
    turns.backward(numbers(60, 60, 61), entries, NOBODY)
    turns = begun(first=(50, 50, 50), done=(10, 20, 30))
    with pytest.raises(Unclear):
        turns.backward(numbers(60, 60, 61), entries, np.array([True, False, False]))


def test_without_a_recomputation_the_first_turn_is_that_of_the_backward_pass():
    turns = begun(done=(10, 20, 30))
    turns.backward(numbers(50, 50, 60), numbers(7, 8, 9), np.array([False, False, True]))
    assert turns.entries["backward"][1].tolist() == [100, 100, 9]


def test_the_first_device_sends_nothing():
    turns = begun()
    turns.send(numbers(60, 61, 62), numbers(122, 106, 108))
    # It is through when its backward pass was issued, by another way than its neighbour.
    with pytest.raises(Unclear):
        turns.finish(numbers(70, 70, 72))
    turns = begun()
    turns.send(numbers(60, 61, 62), numbers(104, 106, 108))
    turns.finish(numbers(70, 70, 72))
    turns.first(2, slice(0, N), numbers(80, 80, 80), numbers(70, 70, 72))
    # The first goes on by itself: it was through with the next one, whose entry is later.
    assert turns.entries["recompute"][2].tolist() == [160, 160, 124]


def test_of_a_part_without_it_every_device_sends():
    turns = Turns((9, N))
    turns.first(1, slice(1, N), numbers(50, 50), numbers(0, 30, 20))
    turns.send(numbers(60, 60), numbers(120, 120))
    turns.finish(numbers(70, 70))
    turns.first(2, slice(1, N), numbers(80, 80), numbers(0, 71, 70))
    assert turns.entries["recompute"][2].tolist() == [-1, 120, 120]


def tables(m=2, copy=10, **options):
    works = [task(11, 20, 2, **options)] * 2
    return Tables(workload(m, works, loss=Kernels(5, 1)), Plain(copy), (0, 1), "never")


def test_a_full_queue_has_room_when_its_first_launches_have_passed():
    queue = LaunchQueue(tables(), 3, 1)
    first, second = numbers(0), numbers(1)
    queue.started(first, first, numbers(100))
    # Of 4 launches 3 fit; the first of two is over after half of 11 ns, rounded up. Who waits goes on after a start.
    after, entries = queue.room(second, first, numbers(100), numbers(101))
    assert (after.tolist(), entries.tolist()) == ([106], [201])
    # It had started before.
    after, entries = queue.room(second, first, numbers(101), numbers(110))
    assert (after.tolist(), entries.tolist()) == ([110], [202])
    # There is room for the first, and on a deeper queue for both.
    for room in (
        queue.room(first, first, numbers(100), numbers(101)),
        LaunchQueue(tables(), 4, 1).room(second, first, numbers(100), numbers(101)),
    ):
        assert [part.tolist() for part in room] == [[101], [200]]


def test_without_launches_there_is_always_room():
    queue = LaunchQueue(Tables(workload(2, [task(launches=0)] * 2), Plain(), (0, 1), "never"), 3, 1)
    after, entries = queue.room(numbers(1), numbers(0), numbers(100), numbers(101))
    assert (after.tolist(), entries.tolist()) == ([101], [200])


def test_what_takes_time_everywhere_is_plain():
    assert tables().plain()
    assert not tables(m=1).plain()
    assert not tables(copy=0).plain()
    assert not tables(input_bytes=()).plain()
    uneven = workload(2, [task()] * 2, loss=Kernels(5, 0))
    assert not Tables(uneven, Plain(), (0, 1), "never").plain()


def test_links_take_time_for_all_copies_or_for_none():
    works = {1: task(input_bytes=(1,)), 2: task(input_bytes=())}
    both = type(workload(1, [task()]))(({1: task(), 2: task()}, works), (2, 1))
    assert tables(copy=0).steady()
    assert tables().steady()
    assert not Tables(both, Plain(), (0, 1), "never").steady()
