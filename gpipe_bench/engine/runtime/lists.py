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
        places: the place of each action in the order of all.
        splits: whether backward passes are cut into I and W.
    """

    name: str
    facts: Facts
    checkpointed: frozenset[tuple[int, int]]
    groups: tuple[int, ...]
    forward: tuple[Action, ...]
    backward: tuple[Action, ...]
    places: dict[Action, int]
    splits: bool

    @classmethod
    def of(
        cls, name: str, facts: Facts, checkpointed: frozenset[tuple[int, int]], groups: tuple[int, ...]
    ) -> ActionLists:
        """The lists of a checked schedule."""
        forward = tuple(action for action in facts.order if action.kind == "F")
        backward = tuple(action for action in facts.order if action.kind != "F")
        places = {action: place for place, action in enumerate(facts.order)}
        return cls(name, facts, checkpointed, groups, forward, backward, places, facts.schedule.splits)

    def per_thread(self, order: Sequence[Action]) -> list[list[Action]]:
        """``order`` cut into a list for each thread."""
        lists: dict[int, list[Action]] = {group: [] for group in self.groups}
        for action in order:
            lists[self.groups[action.j]].append(action)
        return list(lists.values())


class Choice:
    """The schedule of a pipeline, for any number of micro-batches."""

    def __init__(self, schedule: ScheduleLike, placement: Sequence[torch.device], rows: Sequence[int]) -> None:
        self.schedule, self._placement, self._rows = schedule, list(placement), max(rows, default=0) + 1
        self._cache: dict[tuple[int, int, bool], ActionLists] = {}

    def lists(self, m: int, checkpointed: int, *, early_recompute: bool) -> ActionLists:
        """The lists for m micro-batches."""
        key = m, checkpointed, early_recompute
        if key not in self._cache:
            self._cache[key] = self._made(*key)
        return self._cache[key]

    def _made(self, m: int, checkpointed: int, early_recompute: bool) -> ActionLists:
        n = len(self._placement)
        if isinstance(self.schedule, str):
            schedule = named_schedule(self.schedule, m, n, self._rows)
        else:
            schedule = _given(self.schedule, m, n)
        if early_recompute:
            schedule = with_recomputation(schedule, checkpointed)
        facts = check(schedule)
        if (facts.microbatches, facts.partitions) != (m, n):
            got = f"{facts.microbatches} micro-batches and {facts.partitions} partitions"
            wanted = f"{m} micro-batches and {n} partitions"
            raise ScheduleError(
                [f"schedule must be for {wanted}, got one for {got}; change chunks, balance or schedule"]
            )
        cells = {(i, j) for kind, i, j in schedule if kind == "R"}
        cells |= {(i, j) for i in range(checkpointed) for j in range(n)}
        name = self.schedule if isinstance(self.schedule, str) else "one of your own"
        return ActionLists.of(name, facts, frozenset(cells), self._groups(facts))

    def _groups(self, facts: Facts) -> tuple[int, ...]:
        """A thread for each accelerator; on the CPU one for each device of the schedule."""
        for row in range(len(facts.schedule.devices)):
            parts = [j for j, place in enumerate(facts.placement) if place == row]
            found = sorted({str(self._placement[j]) for j in parts})
            if len(found) > 1:
                rule = f"partitions {', '.join(map(str, parts))} must be on one device, as the schedule has them"
                raise ScheduleError([f"{rule}, got {', '.join(found)}; move the layers, or change the schedule"])
        first = [self._placement.index(device) for device in self._placement]
        placed = zip(self._placement, first, facts.placement, strict=True)
        return tuple(row if device.type == "cpu" else -1 - index for device, index, row in placed)


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


def schedule_rows(schedule: ScheduleLike | None, n: int, devices: int) -> tuple[int, ...]:
    """For each partition the device of the schedule that has it; only schedules of a loop depend on ``devices``."""
    if n and schedule is not None and not isinstance(schedule, str):
        schedule = _given(schedule, n, n)
    return () if callable(schedule) else placement(schedule, n, devices)
