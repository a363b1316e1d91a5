"""Changes of a schedule by hand, each checked: an action that moves, and micro-batches that change places.

What may move where is what :func:`gpipe_bench.schedules.check` accepts; there is no second rule.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from itertools import pairwise

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import KINDS, Action, Schedule
from gpipe_bench.schedules.check import check

Place = tuple[int, int]
"""A device, and a position in its list of actions; both from 0."""


def moved(schedule: Schedule, place: Place, to: Place) -> Schedule:
    """The schedule with one action taken to another place. Where that parts the two of a pair, they are none.

    Args:
        schedule: a schedule that can run.
        place: where the action is.
        to: where it is in the result.

    Raises:
        ScheduleError: there is no such place, or the result cannot run; the message names actions.
    """
    device, k = place
    _require_place(schedule, place, 0)
    _require_place(schedule, to, 0 if to[0] == device else 1)
    rows = [list(row) for row in schedule.devices]
    rows[to[0]].insert(to[1], rows[device].pop(k))
    following = dict(pair for row in schedule.devices for pair in pairwise(row))
    now = dict(pair for row in rows for pair in pairwise(row))
    return check(Schedule.of(rows, (one for one in schedule.pairs if now.get(one) == following.get(one)))).schedule


def reach(schedule: Schedule, place: Place) -> tuple[int, int]:
    """The first and the last position of its device to which an action may move; all between them are legal, too.

    An action moves away from what it needs, or from what needs it, until it meets that: so the legal positions are one
    interval, whose ends are found by bisection.

    Raises:
        ScheduleError: there is no such place.
    """
    _require_place(schedule, place, 0)
    return _farthest(schedule, place, 0), _farthest(schedule, place, len(schedule.devices[place[0]]) - 1)


def _farthest(schedule: Schedule, place: Place, end: int) -> int:
    """The legal position that is the nearest to ``end``."""
    good, bad = place[1], end
    if _may_move(schedule, place, end):
        return end
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if _may_move(schedule, place, middle) else (good, middle)
    return good


def _may_move(schedule: Schedule, place: Place, position: int) -> bool:
    try:
        moved(schedule, place, (place[0], position))
    except ScheduleError:
        return False
    return True


def exchanged(schedule: Schedule, one: int, other: int, kinds: Container[str] = KINDS) -> Schedule:
    """The schedule with two micro-batches in each other's places on all devices.

    One move can never do that: both ends of a channel must have the same order.

    Args:
        schedule: a schedule that can run.
        one: a micro-batch, from 0.
        other: the other one.
        kinds: of the actions that change places: all; ``"F"``, so that the forward passes alone do; or ``"RBIW"``.

    Raises:
        ScheduleError: there is no such micro-batch, or the result cannot run.
    """
    m = schedule.microbatches
    for i in (one, other):
        if not (type(i) is int and 0 <= i < m):
            raise ScheduleError([f"a micro-batch must be a whole number from 0 to {m - 1}, got {i!r}; correct it"])
    place = {one: other, other: one}

    def swapped(action: Action) -> Action:
        return action._replace(i=place.get(action.i, action.i)) if action.kind in kinds else action

    rows = [list(map(swapped, row)) for row in schedule.devices]
    return check(Schedule.of(rows, map(swapped, schedule.pairs))).schedule


def _require_place(schedule: Schedule, place: Sequence[int], more: int) -> None:
    """A place that is there, or up to ``more`` positions behind the last one."""
    if len(place) == 2 and all(type(number) is int and number >= 0 for number in place):
        device, k = place
        if device < len(schedule.devices) and k < len(schedule.devices[device]) + more:
            return
    raise ScheduleError([f"a place must be a device and a position of its list, got {place!r}; correct it"])
