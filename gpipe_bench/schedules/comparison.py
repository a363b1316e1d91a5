"""When each action ran beside when it was predicted to run, and where the two part ways."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from gpipe_bench.schedules.actions import Action, Schedule
from gpipe_bench.schedules.timing import Durations, timing

Times = Mapping[Action, tuple[float, float]]
"""Start and end of actions, in ms from the start of the step."""


@dataclass(frozen=True, slots=True)
class ActionTimes:
    """One action.

    Attributes:
        device: of the schedule.
        action: kind, micro-batch and partition.
        predicted: its start and end, in ms.
        actual: the same of a run.
    """

    device: int
    action: Action
    predicted: tuple[float, float]
    actual: tuple[float, float]

    @property
    def late_ms(self) -> float:
        """By how much it started later than predicted."""
        return self.actual[0] - self.predicted[0]

    @property
    def longer_ms(self) -> float:
        """By how much it took longer than predicted."""
        return (self.actual[1] - self.actual[0]) - (self.predicted[1] - self.predicted[0])


def compared(schedule: Schedule, predicted: Times, actual: Times) -> list[ActionTimes]:
    """The actions that both have, in the order of their predicted starts."""
    rows = [
        ActionTimes(device, action, predicted[action], actual[action])
        for device, row in enumerate(schedule.devices)
        for action in row
        if action in predicted and action in actual
    ]
    return sorted(rows, key=lambda row: (row.predicted[0], row.device))


def parting(rows: Iterable[ActionTimes], tolerance_ms: float) -> ActionTimes | None:
    """The first action that started, or ended, more than ``tolerance_ms`` off its prediction; None if none did."""
    return next((row for row in rows if max(abs(row.late_ms), abs(row.late_ms + row.longer_ms)) > tolerance_ms), None)


def from_own_durations(schedule: Schedule, actual: Times) -> dict[Action, tuple[float, float]]:
    """The times of arithmetic, with free transfers, where each pass takes the median of the run on its partition."""
    found: dict[tuple[str, int], list[float]] = {}
    for action, (start, end) in actual.items():
        found.setdefault((action.kind, action.j), []).append(end - start)

    def usual(kind: str, j: int) -> float:
        return median(found.get((kind, j), [0.0]))

    each = []
    for j in range(schedule.partitions):
        # Of a backward pass in one piece it does not matter which part takes how long.
        inputs = usual("I", j) if ("I", j) in found or ("W", j) in found else usual("B", j)
        each.append(Durations(usual("F", j), inputs, usual("W", j)))
    times = timing(schedule, each)
    return {action: (times.start[action], times.end[action]) for action in schedule}
