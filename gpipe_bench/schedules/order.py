"""One order of all actions that keeps the order of every device: the proof that a schedule ends.

One host thread can run a schedule in this order. If there is none, some devices wait for each other for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import Action, Schedule, needs

_NAMED = 6


def merged_order(schedule: Schedule) -> list[Action]:
    """All actions in one order, round by round: each device whose next action is ready takes it.

    A recomputation is taken together with the B or I that follows it. So one thread holds what it recomputed for one
    partition at a time.

    Raises:
        ScheduleError: the devices wait for each other; the message names the actions that each one waits for.
    """
    n = schedule.partitions
    rows = [deque(row) for row in schedule.devices]
    done: set[Action] = set()
    order: list[Action] = []
    while any(rows):
        taken = [row.popleft() for row in rows if row and not _missing(row, n, done) for _ in _together(row)]
        if not taken:
            raise ScheduleError([_deadlock(rows, n, done)])
        order += taken
        done.update(taken)
    return order


def _together(row: deque[Action]) -> list[Action]:
    """What a device takes next."""
    pair = len(row) > 1 and row[0].kind == "R" and row[1].kind in "BI" and row[0][1:] == row[1][1:]
    return [row[0], row[1]] if pair else [row[0]]


def _missing(row: deque[Action], n: int, done: set[Action]) -> list[Action]:
    """What the device of ``row`` still waits for."""
    groups = [group for action in _together(row) for group in needs(action, n)]
    return [group[0] for group in groups if done.isdisjoint(group)]


def _deadlock(rows: Iterable[deque[Action]], n: int, done: set[Action]) -> str:
    stuck = [
        f"device {device} waits with {row[0]} for {', '.join(map(str, dict.fromkeys(_missing(row, n, done))))}"
        for device, row in enumerate(rows)
        if row
    ]
    shown = "; ".join(stuck[:_NAMED]) + (f"; and {len(stuck) - _NAMED} more" if len(stuck) > _NAMED else "")
    return f"devices must not wait for each other, got a deadlock: {shown}; put what is waited for earlier"
