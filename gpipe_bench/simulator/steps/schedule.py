"""The schedule of a run, and its devices."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.schedules import Schedule, named_schedule
from gpipe_bench.schedules.table import placement


def chosen_schedule(schedule: str | Schedule, m: int, n: int, devices: Sequence[int]) -> Schedule:
    """A schedule by its name, or as it is.

    Args:
        schedule: either.
        m: micro-batches.
        n: partitions.
        devices: of each partition; empty: as the schedule has them. They say on how many devices a schedule of a loop
            is; on a single one, or where none is given, it has two partitions on each device.

    Raises:
        ScheduleError: there is no such schedule, or not for these numbers.
        ValueError: the schedule is for other numbers.
    """
    if isinstance(schedule, str):
        several = len(set(devices)) if len(set(devices)) > 1 else None
        schedule = named_schedule(schedule, m, n, max(placement(schedule, n, several)) + 1)
    elif (schedule.microbatches, schedule.partitions) != (m, n):
        got = f"{schedule.microbatches} micro-batches and {schedule.partitions} partitions"
        raise ValueError(f"schedule must be for {m} micro-batches and {n} partitions, got one for {got}; change it")
    return schedule


def check_devices(ranks: Sequence[int], devices: Sequence[int]) -> None:
    """Check that partitions which a schedule has on one device are on one.

    Args:
        ranks: for each partition its device of the schedule.
        devices: of each partition.

    Raises:
        ValueError: they are not.
    """
    first: dict[int, int] = {}
    for j, (rank, device) in enumerate(zip(ranks, devices, strict=True)):
        one = first.setdefault(rank, j)
        if devices[one] != device:
            rule = f"devices must be the same for partitions {one} and {j}, which the schedule has on one device"
            raise ValueError(f"{rule}, got {devices[one]} and {device}; use {[*ranks]}")
