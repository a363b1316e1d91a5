"""A schedule drawn as text: a line for each device, time to the right, one field for each unit of time."""

from __future__ import annotations

from gpipe_bench.schedules.actions import Schedule
from gpipe_bench.schedules.timing import timing

__all__ = ["drawn"]


def drawn(schedule: Schedule) -> str:
    """The schedule with T_F = T_B = T_W = 1, such as ``F0`` for the forward pass of micro-batch 0.

    Where devices have several partitions the partition follows: ``F0,2``.

    Raises:
        ScheduleError: the devices wait for each other.
    """
    times = timing(schedule)
    several = schedule.partitions > len(schedule.devices)
    names = {action: f"{action.kind}{action.i}" + (f",{action.j}" if several else "") for action in schedule}
    width = 1 + max(map(len, names.values()), default=0)
    lines = []
    for device, row in enumerate(schedule.devices):
        line = ""
        for action in row:
            line = line.ljust(width * round(times.start[action])) + names[action]
        lines.append(f"device {device}  {line}")
    return "\n".join(lines)
