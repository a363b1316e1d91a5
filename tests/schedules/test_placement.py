"""One function says which device of a schedule has a partition."""

from __future__ import annotations

import pytest

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import SCHEDULES, named_schedule
from gpipe_bench.schedules.table import device_count, partition_count, placement, shared_devices


@pytest.mark.parametrize(
    ("schedule", "devices", "homes"),
    [
        (None, None, (0, 1, 2, 3)),
        ("gpipe", None, (0, 1, 2, 3)),
        ("1f1b", 2, (0, 1, 2, 3)),
        ("interleaved", None, (0, 1, 0, 1)),
        ("interleaved", 4, (0, 1, 2, 3)),
        ("looped_bfs", 1, (0, 0, 0, 0)),
        ("zb_v", None, (0, 1, 1, 0)),
        ("zb_v", 4, (0, 1, 1, 0)),
        (named_schedule("v_half", 3, 4, 2), None, (0, 1, 1, 0)),
    ],
)
def test_four_partitions(schedule, devices, homes):
    assert placement(schedule, 4, devices) == homes


@pytest.mark.parametrize(("schedule", "n"), [("zb_v", 3), ("interleaved", 3), (named_schedule("1f1b", 2, 2, 2), 3)])
def test_partitions_that_a_schedule_does_not_have(schedule, n):
    with pytest.raises(ScheduleError, match="schedule"):
        placement(schedule, n)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_numbers_of_partitions_and_devices_are_inverse(schedule):
    n = partition_count(schedule, 3)
    assert device_count(schedule, n) == max(placement(schedule, n)) + 1 == 3


@pytest.mark.parametrize(("devices", "places"), [(1, [0, 0, 0, 0]), (3, [0, 0, 1, 2]), (8, [0, 1, 2, 3])])
def test_neighbours_share_a_device_where_there_are_too_few(devices, places):
    assert shared_devices(4, devices) == places
