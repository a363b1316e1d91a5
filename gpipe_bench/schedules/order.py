"""One order of all actions that keeps the order of every device: the proof that a schedule ends.

One host thread can run a schedule in this order. If there is none, some devices wait for each other for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Iterator, Sequence
from itertools import zip_longest

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import Action, Schedule, needs

_NAMED = 6


def merged_order(schedule: Schedule, pairs: Iterable[Action] = ()) -> list[Action]:
    """All actions in one order, round by round: each device whose next action is ready takes it.

    A recomputation is taken together with the B or I that follows it. So one thread holds what it recomputed for one
    partition at a time. The order of a schedule is computed once.

    Args:
        schedule: any schedule.
        pairs: actions that are taken together with the next one of their device, too.

    Raises:
        ScheduleError: the devices wait for each other; the message names the actions that each one waits for.
    """
    together = frozenset(pairs)
    if together not in schedule.orders:
        schedule.orders[together] = tuple(_merged(schedule, together))
    return list(schedule.orders[together])


def _merged(schedule: Schedule, pairs: Container[Action]) -> list[Action]:
    n = schedule.partitions
    rows = [deque(_together(row, pairs)) for row in schedule.devices]
    done: set[Action] = set()
    order: list[Action] = []
    while any(rows):
        taken = [action for row in rows if row and _is_ready(row[0], n, done) for action in row.popleft()]
        if not taken:
            raise ScheduleError([_deadlock(rows, n, done)])
        order += taken
        done.update(taken)
    return order


def _together(row: Sequence[Action], pairs: Container[Action]) -> Iterator[list[Action]]:
    """The actions of a device in groups that it takes at once."""
    group: list[Action] = []
    for action, following in zip_longest(row, row[1:]):
        group.append(action)
        recomputes = following and action.kind == "R" and following.kind in "BI" and following[1:] == action[1:]
        if not (following and action in pairs) and not recomputes:
            yield group
            group = []


def _is_ready(group: Sequence[Action], n: int, done: set[Action]) -> bool:
    if len(group) > 1:
        return not _missing(group, n, done)
    return not any(map(done.isdisjoint, needs(group[0], n)))


def _missing(group: Sequence[Action], n: int, done: set[Action]) -> list[Action]:
    """What the device of ``group`` still waits for."""
    needed = (some for action in group for some in needs(action, n))
    return [some[0] for some in needed if done.isdisjoint(some) and not any(one in group for one in some)]


def _deadlock(rows: Iterable[deque[list[Action]]], n: int, done: set[Action]) -> str:
    stuck = [
        f"device {device} waits with {row[0][0]} for {', '.join(map(str, dict.fromkeys(_missing(row[0], n, done))))}"
        for device, row in enumerate(rows)
        if row
    ]
    shown = "; ".join(stuck[:_NAMED]) + (f"; and {len(stuck) - _NAMED} more" if len(stuck) > _NAMED else "")
    return f"devices must not wait for each other, got a deadlock: {shown}; put what is waited for earlier"
