"""Where the time of a traced step went, what other schedules would take, and how the step differs from another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from gpipe_bench.errors import ScheduleError
from gpipe_bench.results.breakdown import Breakdown, Interval, split_device_time
from gpipe_bench.results.timeline import COPY_KINDS
from gpipe_bench.results.traced import TracedStep, action_of
from gpipe_bench.schedules import (
    SCHEDULES,
    Action,
    Durations,
    Schedule,
    in_flight,
    named_schedule,
    timing,
    with_recomputation,
)
from gpipe_bench.schedules.actions import in_pairs, needs
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES, checkpoint_stop
from gpipe_bench.schedules.table import partition_count


@dataclass(frozen=True, slots=True)
class Alternative:
    """What a schedule would take with the durations of a step.

    Attributes:
        schedule: its name.
        microbatches: m; the batch is the same.
        checkpoint: the mode.
        length_us: of the step, by :func:`gpipe_bench.schedules.timing`.
        in_flight: on the device with the most, micro-batches whose activations it holds, in units of one of the traced
            step on a whole device.
    """

    schedule: str
    microbatches: int
    checkpoint: str
    length_us: float
    in_flight: float


@dataclass(frozen=True, slots=True)
class Shift:
    """An action of a step, beside the same action of another step or of a schedule.

    Attributes:
        device: of the step.
        action: kind, micro-batch and partition.
        expected_us: start and end in the other one, in microseconds from its first start.
        actual_us: the same in the step.
    """

    device: str
    action: Action
    expected_us: Interval
    actual_us: Interval

    @property
    def late_us(self) -> float:
        """By how much it started later than there."""
        return self.actual_us[0] - self.expected_us[0]

    @property
    def off_us(self) -> float:
        """By how much it started, or ended, earlier or later than there, whichever is more."""
        return max(abs(self.late_us), abs(self.actual_us[1] - self.expected_us[1]))


def split(step: TracedStep) -> list[tuple[Breakdown, float]]:
    """Of each device the shares of its time, and that of its idle time in which the host had not issued what could run.

    The latter is part of imbalance and bubble, and 0 where a trace does not say when the host issued an action.
    """
    numbers = {name: number for number, name in enumerate(step.devices)}
    end_us = step.start_us + step.length_us
    device_of = {event.partition: numbers[event.device] for event in step.events}
    shares = split_device_time(step.events, device_of, step.start_us, end_us)
    return list(zip(shares, (_host_time(step, name) / step.length_us for name in step.devices), strict=True))


def alternatives(step: TracedStep) -> list[Alternative]:
    """Every named schedule on as many devices, in every checkpoint mode, with as many micro-batches, half and twice.

    Durations are means of the traced ones. Where a schedule needs another number of partitions, the model is cut anew
    as if its layers were spread evenly within each; a micro-batch of half the samples takes half the time.
    """
    given, p = _durations(step), len(step.devices)
    m = 1 + max(event.microbatch for event in step.events)
    transfer = mean([event.end_us - event.start_us for event in step.events if event.kind in COPY_KINDS] or [0.0])
    found = []
    for name in SCHEDULES:
        n = partition_count(name, p)
        for chunks in sorted({m, max(m // 2, 1), 2 * m}):
            try:
                schedule = named_schedule(name, chunks, n, p)
            except ScheduleError:
                continue
            scale = m / chunks
            durations = [_scaled(part, scale) for part in _cut(given, n)]
            held = max(in_flight(schedule)) * scale * p / n
            for mode in CHECKPOINT_MODES:
                ran = with_recomputation(schedule, checkpoint_stop(mode, chunks))
                length = timing(ran, durations, transfer * scale, step.overlap).makespan
                found.append(Alternative(name, chunks, mode, length, held))
    return sorted(found, key=lambda one: one.length_us)


def by_arithmetic(step: TracedStep) -> float:
    """What the traced order takes with its mean durations and nothing else, in microseconds.

    Raises:
        ScheduleError: the trace lacks actions that others wait for.
    """
    copies = [event.end_us - event.start_us for event in step.events if event.kind in COPY_KINDS]
    return timing(step.schedule, _durations(step), mean(copies or [0.0]), step.overlap).makespan


def shifts(step: TracedStep, other: TracedStep | Schedule) -> list[Shift]:
    """The actions that a step shares with another one, in the order in which the other one starts them.

    Args:
        step: a traced step.
        other: another one; or a schedule, whose actions take the mean durations of ``step`` and whose transfers are
            free. It gets the recomputations of ``step``.

    Raises:
        ScheduleError: there is no such action, or ``step`` lacks the partitions of the schedule.
    """
    actual = _action_times(step)
    expected = _times_of(step, other) if isinstance(other, Schedule) else _action_times(other)
    devices = {action_of(event): event.device for event in step.computations}
    found = [Shift(devices[action], action, expected[action], actual[action]) for action in expected.keys() & actual]
    if not found:
        raise ScheduleError(["two steps must share actions, got none; compare steps of the same pipeline"])
    return sorted(found, key=lambda one: (one.expected_us, one.device, one.action))


def _action_times(step: TracedStep) -> dict[Action, Interval]:
    events = [*step.computations]
    zero = min(event.start_us for event in events)
    return {action_of(event): (event.start_us - zero, event.end_us - zero) for event in events}


def _times_of(step: TracedStep, schedule: Schedule) -> dict[Action, Interval]:
    durations = _durations(step)
    if schedule.partitions != len(durations):
        got = f"{schedule.partitions} for a step of {len(durations)}"
        raise ScheduleError([f"schedule must be for the partitions of the traced step, got {got}; use another one"])
    recomputed = max((event.microbatch + 1 for event in step.events if event.kind == "recompute"), default=0)
    ran = with_recomputation(schedule, recomputed)
    times = timing(ran, durations)
    return {action: (times.start[action], times.end[action]) for action in ran}


def _host_time(step: TracedStep, device: str) -> float:
    ends = {action_of(event): event.end_us for event in step.computations}
    n = 1 + max(event.partition for event in step.events)
    free, lost = step.start_us, 0.0
    for event in step.computations:
        if event.device != device:
            continue
        ready = [ends[one] for group in needs(action_of(event), n) for one in group if one in ends]
        lost += max(0.0, min(event.issue_us, event.start_us) - max([free, *ready]))
        free = max(free, event.end_us)
    return lost


def _durations(step: TracedStep) -> list[Durations]:
    """The mean durations of each partition.

    Of a pair only the sum is known, so passes that ran alone count, or else all. A backward pass that is not split is
    divided as the split ones of its partition are, or else in halves.
    """
    n = 1 + max(event.partition for event in step.events)
    units = (unit for row in step.schedule.devices for unit in in_pairs(row, step.pairs))
    paired = {action for unit in units if len(unit) == 2 for action in unit}
    times = {action_of(event): event.end_us - event.start_us for event in step.computations}

    def average(kinds: str, j: int) -> float:
        own = [action for action in times if action.kind in kinds and action.j == j]
        own = [action for action in own if action not in paired] or own
        return sum(times[action] for action in own) / max(len({action.i for action in own}), 1)

    found = []
    for j in range(n):
        backward, inputs, weights = (average(kinds, j) for kinds in ("BIW", "I", "W"))
        share = inputs / (inputs + weights) if inputs + weights else 0.5
        found.append(Durations(average("F", j), backward * share, backward * (1 - share)))
    return found


def _scaled(durations: Durations, factor: float) -> Durations:
    return Durations(durations.forward * factor, durations.inputs * factor, durations.weights * factor)


def _cut(parts: Sequence[Durations], n: int) -> list[Durations]:
    """The durations after the model is cut anew into n partitions of equal size."""
    size = len(parts) / n
    found = []
    for j in range(n):
        low, high = j * size, (j + 1) * size
        shares = [(part, max(0.0, min(high, k + 1) - max(low, k))) for k, part in enumerate(parts)]
        found.append(
            Durations(
                sum(part.forward * share for part, share in shares),
                sum(part.inputs * share for part, share in shares),
                sum(part.weights * share for part, share in shares),
            )
        )
    return found
