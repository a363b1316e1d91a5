"""How long a schedule takes: arithmetic with the durations of actions and transfers, without engine or hardware."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, isfinite

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import KINDS, Action, Schedule, in_pairs, needs
from gpipe_bench.schedules.order import merged_order


@dataclass(frozen=True, slots=True)
class Durations:
    """Durations of the passes of one micro-batch through one partition, in any one unit.

    Attributes:
        forward: T_F, of F and of R.
        inputs: T_B, of I.
        weights: T_W, of W; B takes T_B + T_W.

    Raises:
        ScheduleError: one of them is no finite number from 0.
    """

    forward: float = 1.0
    inputs: float = 1.0
    weights: float = 1.0

    def __post_init__(self) -> None:
        times = self.forward, self.inputs, self.weights
        if not all(isfinite(time) and time >= 0 for time in times):
            got = ", ".join(map(str, times))
            raise ScheduleError([f"durations must be 0 or more, got {got}; give finite ones"])

    def of(self, kind: str) -> float:
        """The duration of an action of this kind."""
        own = {"F": self.forward, "R": self.forward, "I": self.inputs, "W": self.weights}
        return own[kind] if kind in own else self.inputs + self.weights


@dataclass(frozen=True, slots=True)
class Timing:
    """When each action runs.

    Attributes:
        start: the start of each action.
        end: the end of each action.
        makespan: from the first start to the last end.
        busy: for each device the sum of its durations.
        spans: for each device the time from its first start to its last end.
    """

    start: dict[Action, float]
    end: dict[Action, float]
    makespan: float
    busy: tuple[float, ...]
    spans: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The idle share of all devices' time until the end of the step, from 0 to 1.

        GPipe (arXiv 1811.06965, section 2.3) defines it so. Megatron-LM (arXiv 2104.04473) gives idle over busy time,
        which is ``bubble / (1 - bubble)``; for Zero Bubble's definition see :attr:`span_bubble`.
        """
        whole = self.makespan * len(self.busy)
        return 1 - fsum(self.busy) / whole if whole else 0.0

    @property
    def span_bubble(self) -> float:
        """The idle share of the device with the longest span, within that span, from 0 to 1.

        Zero Bubble (arXiv 2401.10241, section 5.3) calls this the bubble rate: devices need not start and end a step
        together, so what a device waits before its first and after its last action does not count.
        """
        longest, busy = max(zip(self.spans, self.busy, strict=True), default=(0.0, 0.0))
        return 1 - busy / longest if longest else 0.0


def timing(
    schedule: Schedule,
    durations: Durations | Sequence[Durations] | None = None,
    transfer: float | Sequence[Sequence[float]] = 0.0,
    overlap: float | None = None,
) -> Timing:
    """Run the schedule in time: every action starts as soon as its device is free and what it needs has arrived.

    Args:
        schedule: any schedule that :func:`gpipe_bench.schedules.check` accepts.
        durations: one for all partitions, or one for each; by default T_F = T_B = T_W = 1.
        transfer: from the end of an action until another device has its result: one time for all pairs of devices, or
            ``transfer[source][target]``. Transfers keep no device busy and do not delay each other.
        overlap: what a pair takes over what its two actions take one after the other. A pair is one action then: it
            starts when the inputs of both are there, and has both results at its end. PyTorch's runtime takes 1
            where no function for pairs is registered. None: the two are actions of their own, as in our runtime.

    Raises:
        ScheduleError: the devices wait for each other, some time is no finite number from 0, or there is not one entry
            for each partition or device.
    """
    n, p = schedule.partitions, len(schedule.devices)
    each = [durations or Durations()] * n if not isinstance(durations, Sequence) else list(durations)
    rows = [[transfer] * p] * p if not isinstance(transfer, Sequence) else [list(row) for row in transfer]
    if len(each) != n or [len(row) for row in rows] != [p] * p:
        got = f"{len(each)} for {n} partitions, and {[len(row) for row in rows]} transfer times for {p} devices"
        rule = "durations must be one for each partition, transfer times one for each pair of devices"
        raise ScheduleError([f"{rule}, got {got}; give all of them"])
    if overlap is not None and not (isfinite(overlap) and overlap >= 0):
        raise ScheduleError([f"overlap must be 0 or more, got {overlap}; give a finite number, or None"])
    if not all(isfinite(time) and time >= 0 for times in rows for time in times):
        raise ScheduleError([f"transfer times must be 0 or more, got {transfer}; give finite ones"])
    home = {action: device for device, row in enumerate(schedule.devices) for action in row}
    lengths = {(kind, j): one.of(kind) for j, one in enumerate(each) for kind in KINDS}
    pairs = schedule.pairs if overlap is not None else frozenset()
    units = {unit[0]: unit for row in schedule.devices for unit in in_pairs(row, pairs)}
    free = [0.0] * p
    busy: list[list[float]] = [[] for _ in range(p)]
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    for first in filter(units.__contains__, merged_order(schedule, pairs)):
        here, unit = home[first], units[first]
        begin, length = free[here], 0.0
        for action in unit:
            length += lengths[action.kind, action.j]
            for group in needs(action, n):
                for one in group:
                    if one in end:
                        there = home[one]
                        begin = max(begin, end[one] + rows[there][here] if there != here else end[one])
        if overlap is not None and len(unit) == 2:
            length *= overlap
        free[here] = begin + length
        busy[here].append(length)
        for action in unit:
            start[action], end[action] = begin, free[here]
    spans = tuple(end[row[-1]] - start[row[0]] if row else 0.0 for row in schedule.devices)
    return Timing(start, end, max(free, default=0.0), tuple(map(fsum, busy)), spans)


def drawn(schedule: Schedule) -> str:
    """The schedule as text: a line for each device, with time to the right and T_F = T_B = T_W = 1.

    ``F0`` is the forward pass of micro-batch 0. Where devices have several partitions the partition follows: ``F0,2``.

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
