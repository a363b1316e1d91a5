"""Actions that move and micro-batches that change places; the checker decides."""

from __future__ import annotations

import pytest

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import Action, check, exchanged, in_flight, moved, named_schedule, reach, timing
from gpipe_bench.schedules.table import partition_count

SMALL = [("gpipe", 3, 3), ("zb_h1", 3, 4), ("interleaved", 2, 4), ("zb_v", 2, 3), ("dualpipe_v", 2, 4)]


def schedule_of(name, p, m):
    return named_schedule(name, m, partition_count(name, p), p)


def test_a_legal_move_gives_a_schedule_that_can_run():
    schedule = named_schedule("1f1b", 8, 4, 4)
    found = moved(schedule, (0, 5), (0, 4))
    assert [*map(str, found.devices[0][:6])] == ["F(0,0)", "F(1,0)", "F(2,0)", "F(3,0)", "F(4,0)", "B(0,0)"]
    assert found.devices[1:] == schedule.devices[1:]
    assert (in_flight(found)[0], timing(found).makespan) == (5, 33)


@pytest.mark.parametrize(
    ("place", "to", "words"),
    [
        ((0, 5), (0, 0), r"got F\(0,0\) next on device 1, and|got F\(4,0\) next on device 0"),
        ((0, 5), (2, 3), "a partition must be on one device"),
        ((1, 5), (1, 2), r"deadlock: device 0 waits with B\(0,0\) for B\(0,1\)"),
        ((3, 1), (3, 0), r"F\(0,3\) must come before B\(0,3\), got it later on device 3; exchange them"),
        ((4, 0), (0, 0), r"a place must be a device and a position of its list, got \(4, 0\)"),
        ((0, 0), (0, 16), r"a place must be .* got \(0, 16\)"),
        ((0, True), (0, 1), "a place must be"),
    ],
)
def test_an_illegal_move_is_refused_with_the_words_of_the_checker(place, to, words):
    with pytest.raises(ScheduleError, match=words):
        moved(named_schedule("1f1b", 8, 4, 4), place, to)


@pytest.mark.parametrize(("name", "p", "m"), SMALL)
def test_the_legal_positions_are_one_interval(name, p, m):
    schedule = schedule_of(name, p, m)
    movable = 0
    for device, row in enumerate(schedule.devices):
        for k in range(len(row)):
            legal = []
            for position in range(len(row)):
                try:
                    check(moved(schedule, (device, k), (device, position)))
                    legal.append(position)
                except ScheduleError:
                    pass
            first, last = reach(schedule, (device, k))
            assert legal == [*range(first, last + 1)], (device, k)
            movable += first < last
    assert bool(movable) == (name != "gpipe")  # where every neighbour waits for the other one, or keeps to its order


def test_a_move_drops_the_pair_that_it_parts_and_no_other():
    schedule = schedule_of("dualpipe_v", 2, 6)
    device, k = next(
        (d, k) for d, row in enumerate(schedule.devices) for k, one in enumerate(row) if one in schedule.pairs
    )
    first = schedule.devices[device][k]
    low, high = reach(schedule, (device, k))
    assert low < k
    assert high >= k
    assert moved(schedule, (device, k), (device, low)).pairs == schedule.pairs - {first}


@pytest.mark.parametrize(("name", "p", "m"), SMALL)
def test_exchanged_micro_batches_leave_the_times_as_they_are(name, p, m):
    schedule = schedule_of(name, p, m)
    found = exchanged(schedule, 0, 2)
    assert timing(found).makespan == timing(schedule).makespan
    assert found.devices[0].index(Action("F", 2, 0)) == schedule.devices[0].index(Action("F", 0, 0))
    assert exchanged(found, 2, 0) == schedule


def test_one_kind_of_passes_may_change_places_alone():
    schedule = named_schedule("gpipe", 4, 2, 2)
    found = exchanged(schedule, 0, 3, "RBIW")
    assert [str(one) for one in found.devices[0]] == [
        *("F(0,0)", "F(1,0)", "F(2,0)", "F(3,0)"),
        *[str(one._replace(i={0: 3, 3: 0}.get(one.i, one.i))) for one in schedule.devices[0][4:]],
    ]
    with pytest.raises(ScheduleError, match=r"deadlock|must come before"):
        exchanged(named_schedule("1f1b", 4, 2, 2), 0, 3, "F")


@pytest.mark.parametrize("i", [4, -1, 1.5, "0"])
def test_a_micro_batch_that_is_not_there_cannot_be_exchanged(i):
    with pytest.raises(ScheduleError, match="a micro-batch must be a whole number from 0 to 3"):
        exchanged(named_schedule("gpipe", 4, 2, 2), 0, i)
