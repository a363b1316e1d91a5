"""Which actions each thread takes, from the schedule that a pipeline was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import SCHEDULES, Action, Facts, Schedule, check, named_schedule, with_recomputation
from gpipe_bench.schedules.table import placement

ScheduleLike = str | Schedule | Callable[[int, int], Schedule]
"""A name, a schedule, or a function from (m, n) to a schedule."""


@dataclass(frozen=True, slots=True)
class ActionLists:
    """A schedule for one number of micro-batches.

    Without ``__dict__``, since threads share it: where two of them ask for that of one object for the first time,
    Python 3.11 may free its values too early, and crash.

    Attributes:
        name: of the schedule.
        facts: its actions, checked.
        checkpointed: the cells to recompute.
        groups: a number for each partition; those with the same number have one thread.
        forward: the forward passes in one order that keeps that of every device.
        backward: all other actions in such an order.
        positions: where each action stands in the order of all.
        splits: whether backward passes are cut into I and W.
    """

    name: str
    facts: Facts
    checkpointed: frozenset[tuple[int, int]]
    groups: tuple[int, ...]
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    positions: dict[Action, int]
    splits: bool

    def per_thread(self, order: Sequence[Action]) -> list[list[Action]]:
        """``order`` cut into a list for each thread."""
        lists: dict[int, list[Action]] = {group: [] for group in self.groups}
        for action in order:
            lists[self.groups[action.j]].append(action)
        return list(lists.values())


def action_lists(
    schedule: ScheduleLike,
    devices: Sequence[torch.device],
    rank_count: int,
    *,
    m: int,
    checkpointed: int,
    early_recompute: bool,
) -> ActionLists:
    """The lists for m micro-batches.

    Args:
        schedule: a name, a schedule, or a function that gives one.
        devices: one per partition.
        rank_count: how many devices the schedule has.
        m: how many micro-batches.
        checkpointed: how many of them are checkpointed, the first ones.
        early_recompute: whether R stands ahead of B.

    Raises:
        ScheduleError: the schedule is for another number of micro-batches or partitions, or for other devices.
    """
    n = len(devices)
    made = named_schedule(schedule, m, n, rank_count) if isinstance(schedule, str) else _given(schedule, m, n)
    if early_recompute:
        made = with_recomputation(made, checkpointed)
    facts = check(made)
    if (facts.microbatches, facts.partitions) != (m, n):
        got = f"{facts.microbatches} micro-batches and {facts.partitions} partitions"
        wanted = f"{m} micro-batches and {n} partitions"
        raise ScheduleError([f"schedule must be for {wanted}, got one for {got}; change chunks, balance or schedule"])
    for rank in range(len(facts.schedule.devices)):
        parts = [j for j, own in enumerate(facts.placement) if own == rank]
        found = sorted({str(devices[j]) for j in parts})
        if len(found) > 1:
            rule = f"partitions {', '.join(map(str, parts))} must be on one device, as the schedule has them"
            raise ScheduleError([f"{rule}, got {', '.join(found)}; move the layers, or change the schedule"])
    order = facts.order
    cells = {(i, j) for kind, i, j in made if kind == "R"} | {(i, j) for i in range(checkpointed) for j in range(n)}
    # A thread for each accelerator; on the CPU one for each device of the schedule.
    first = [list(devices).index(device) for device in devices]
    placed = zip(devices, first, facts.placement, strict=True)
    return ActionLists(
        name=schedule if isinstance(schedule, str) else "one of your own",
        facts=facts,
        checkpointed=frozenset(cells),
        groups=tuple(rank if device.type == "cpu" else -1 - index for device, index, rank in placed),
        forward=tuple(action for action in order if action.kind == "F"),
        backward=tuple(action for action in order if action.kind != "F"),
        positions={action: position for position, action in enumerate(order)},
        splits=facts.schedule.splits,
    )


def checked_schedule(schedule: Any) -> ScheduleLike | None:
    """``schedule`` with lists of actions as a Schedule."""
    if schedule is None or isinstance(schedule, str | Schedule) or callable(schedule):
        given: ScheduleLike | None = schedule
        return given
    try:
        return Schedule.of(schedule)
    except TypeError:
        raise TypeError(
            f"schedule must be one of {', '.join(SCHEDULES)}, a Schedule, a list of (kind, i, j) per device, or a "
            f"function of (m, n), got {schedule!r}; pass one of these"
        ) from None


def _given(schedule: Schedule | Callable[[int, int], Schedule], m: int, n: int) -> Schedule:
    """One of the user's own, which a function may give as lists."""
    if isinstance(schedule, Schedule):
        return schedule
    try:
        made = schedule(m, n)
        return made if isinstance(made, Schedule) else Schedule.of(made)
    except TypeError as error:
        rule = "schedule must be a Schedule, or a function of (m, n) that gives one or lists of (kind, i, j)"
        raise TypeError(f"{rule}, got {schedule!r} and the error '{error}'; change the function") from error


def ranks_of_partitions(schedule: ScheduleLike | None, n: int, devices: int) -> tuple[int, ...]:
    """For each partition the device of the schedule that has it; only schedules of a loop depend on ``devices``."""
    if n and schedule is not None and not isinstance(schedule, str):
        schedule = _given(schedule, n, n)
    return () if callable(schedule) else placement(schedule, n, devices)
