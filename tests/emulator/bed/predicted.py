"""When a schedule ends if only its actions and its copies take time.

    device   its actions in their order, each when it has what it needs
    copy     when its action has ended; occupies the engine that sends on one device and the one that receives on the
             other; through the host one after the other, for half of the time each

Of copies that wait for an engine, the one that was ready first goes first; at one time the one of the lower device,
then of the lower copy stream. A partition has one for each micro-batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from gpipe_bench.schedules import Action, Durations, Schedule
from gpipe_bench.schedules.actions import needs

__all__ = ["predicted_end"]

Hop = tuple[tuple[int, int], tuple[str, ...], int]
"""Part of a copy: device and copy stream that it is queued on, the engines that it occupies, how long."""


def predicted_end(schedule: Schedule, times: Durations, copy: int, *, staged: bool = False) -> int:
    """When the last action ends; ``copy``: the time of a copy, in the unit of ``times``."""
    homes, n = schedule.placement, schedule.partitions
    rows = [deque(row) for row in schedule.devices]
    routes = {action: _hops(action, target, schedule, copy, staged) for action, target in _copied(schedule)}
    there: set[tuple[Action, int]] = set()  # what has ended or arrived, and on which device
    busy: dict[Any, int] = {}  # devices and engines, until when
    running: list[tuple[int, Action, int]] = []  # end, action, and how many of its hops are done; 0: the action itself
    waiting: list[tuple[int, Hop, Action, int]] = []  # the same with hops that are ready, and since when
    now = 0
    while True:
        for d, row in enumerate(rows):
            if row and busy.get(d, 0) <= now and _is_ready(row[0], d, n, there):
                busy[d] = now + int(times.of(row[0].kind))
                running.append((busy[d], row.popleft(), 0))
        for turn in sorted(waiting):
            _, (_, engines, duration), action, done = turn
            if all(busy.get(engine, 0) <= now for engine in engines):
                waiting.remove(turn)
                busy |= dict.fromkeys(engines, now + duration)
                running.append((now + duration, action, done + 1))
        if not running:
            assert not any(rows)
            return max(busy[d] for d in range(len(rows)))
        now = min(running)[0]
        for event in [event for event in running if event[0] == now]:
            running.remove(event)
            _, action, done = event
            route = routes.get(action, [])
            there |= {(action, homes[action.j])}
            if done < len(route):
                waiting.append((now, route[done], action, done))
            elif done:
                there |= {(action, homes[_target(action)])}


def _target(action: Action) -> int:
    """The partition that a result goes to."""
    return action.j + (1 if action.kind == "F" else -1)


def _copied(schedule: Schedule) -> Iterator[tuple[Action, int]]:
    """Actions whose results go to another device, and the partition that they go to."""
    for action in schedule:
        target = _target(action)
        sent = action.kind in "FBI" and 0 <= target < schedule.partitions
        if sent and schedule.placement[target] != schedule.placement[action.j]:
            yield action, target


def _hops(action: Action, target: int, schedule: Schedule, copy: int, staged: bool) -> list[Hop]:
    (source, out), (receiver, into) = (_queue(schedule, action.i, j) for j in (action.j, target))
    sends, receives = f"{source} sends", f"{receiver} receives"
    if staged:
        return [((source, out), (sends,), copy // 2), ((receiver, into), (receives,), copy // 2)]
    return [((source, out), (sends, receives), copy)]


def _queue(schedule: Schedule, i: int, j: int) -> tuple[int, int]:
    """Device and copy stream of micro-batch i on partition j."""
    home = schedule.placement[j]
    return home, schedule.placement[:j].count(home) * schedule.microbatches + i


def _is_ready(action: Action, device: int, n: int, there: set[tuple[Action, int]]) -> bool:
    return all(any((one, device) in there for one in group) for group in needs(action, n))
