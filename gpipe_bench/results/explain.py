"""Where the time of a traced step went, and what other schedules would take with its durations.

A trace is one of ours, or one that the PyTorch profiler wrote of ``torch.distributed.pipelining``, whose actions are
ranges such as ``PP:0F3``, or ``Forward 3`` where a rank has one stage, with a file for each rank.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Final

from gpipe_bench.errors import ConfigError, ScheduleError
from gpipe_bench.results.breakdown import Breakdown, split_device_time
from gpipe_bench.results.timeline import COPY_KINDS, KINDS, TimelineEvent
from gpipe_bench.schedules import SCHEDULES, Durations, Schedule, in_flight, named_schedule, timing, with_recomputation
from gpipe_bench.schedules.actions import Action, needs
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES, checkpoint_stop
from gpipe_bench.schedules.table import partition_count

_LETTERS: Final = {"forward": "F", "recompute": "R", "backward": "B", "backward_inputs": "I", "backward_weights": "W"}
_TORCH: Final = {"F": "forward", "B": "backward", "I": "backward_inputs", "W": "backward_weights",
                 "RECV_F": "copy", "RECV_B": "copy_grad"}  # fmt: skip
_RANGE: Final = re.compile(r"(\d+)(F|B|I|W|RECV_F|RECV_B)(\d+)")
_OF_ONE_STAGE: Final = re.compile(r"(Forward|Backward) (\d+)")


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a trace.

    Attributes:
        devices: their names.
        events: of the step; ``partition`` is the pipeline's, ``device`` one of :attr:`devices`.
        on_host: whether the ranges are the host's, which include what a device waits for.
        processes: how many ran, as the PyTorch profiler says it.
    """

    devices: tuple[str, ...]
    events: tuple[TimelineEvent, ...]
    on_host: bool = False
    processes: int = 1

    @property
    def issued(self) -> bool:
        """Whether the trace says when the host issued an action."""
        return all(math.isfinite(event.issue_us) for event in self.events)

    @property
    def start_us(self) -> float:
        """The first start."""
        return min(event.start_us for event in self.events)

    @property
    def length_us(self) -> float:
        """From the first start to the last end."""
        return max(event.end_us for event in self.events) - self.start_us

    @property
    def computations(self) -> Iterator[TimelineEvent]:
        """All events but copies, in the order of their starts."""
        return (event for event in sorted(self.events, key=lambda event: event.start_us) if event.kind in _LETTERS)

    @property
    def schedule(self) -> Schedule:
        """The order in which the devices took their actions."""
        rows: dict[str, list[Action]] = {name: [] for name in self.devices}
        for event in self.computations:
            rows[event.device].append(_action(event))
        return Schedule.of(rows.values())


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


def read_step(paths: Sequence[Path]) -> Step:
    """The last step of a trace: one file of ours, or the files of all ranks that the PyTorch profiler wrote.

    Raises:
        ConfigError: a file is no trace, or has no action of a pipeline; the files lack a stage.
    """
    found: dict[tuple[str, str, int, int], TimelineEvent] = {}
    on_host, processes = False, 1
    for position, path in enumerate(paths):
        try:
            trace = json.loads(path.read_text(encoding="utf-8"))
            rows = [row for row in trace["traceEvents"] if row.get("ph") == "X"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError([f"trace must be a Chrome trace in JSON, got {path} ({reason}); name another"]) from error
        ranges = [row for row in rows if _is_range(str(row.get("name", "")))]
        on_gpu = [row for row in ranges if row.get("cat") == "gpu_user_annotation"]
        on_host |= bool(ranges) and not on_gpu
        group = trace.get("distributedInfo", {})
        rank, processes = group.get("rank", position), max(processes, group.get("world_size", 1))
        own = [_ours(row) for row in rows if row.get("cat") in KINDS]
        own += [event for row in on_gpu or ranges for event in _of_torch(row, rank)]
        if not own:
            rule = "trace must have actions of a pipeline: a timeline of ours, or ranges such as PP:0F3"
            raise ConfigError([f"{rule}, got none in {path}; trace pipe.step, or schedule.step with torch.profiler"])
        # Of several steps the last one stays.
        for event in sorted(own, key=lambda event: event.start_us):
            found[event.device, event.kind, event.microbatch, event.partition] = event
    homes = {event.partition: event.device for event in found.values() if event.kind in _LETTERS}
    if missing := sorted(set(range(max(homes))) - set(homes)):
        raise ConfigError([f"traces must have all stages, got none of {missing}; name the files of all ranks"])
    events = [event for event in found.values() if event.partition in homes]
    return Step(tuple(dict.fromkeys(homes[j] for j in sorted(homes))), tuple(events), on_host, processes)


def split(step: Step) -> list[tuple[Breakdown, float]]:
    """Of each device the shares of its time, and that of its idle time in which the host had not issued what could run.

    The latter is part of imbalance and bubble, and 0 where a trace does not say when the host issued an action.
    """
    numbers = {name: number for number, name in enumerate(step.devices)}
    homes = {event.partition: numbers[event.device] for event in step.events if event.kind in _LETTERS}
    end_us = step.start_us + step.length_us
    moved = [_on_device(event, homes[event.partition]) for event in step.events]
    shares = split_device_time(moved, len(numbers), step.start_us, end_us)
    return list(zip(shares, (_host_time(step, name) / step.length_us for name in step.devices), strict=True))


def alternatives(step: Step) -> list[Alternative]:
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
                length = timing(ran, durations, transfer * scale).makespan
                found.append(Alternative(name, chunks, mode, length, held))
    return sorted(found, key=lambda one: one.length_us)


def by_arithmetic(step: Step) -> float:
    """What the traced order takes with its mean durations and nothing else, in microseconds.

    Raises:
        ScheduleError: the trace lacks actions that others wait for.
    """
    copies = [event.end_us - event.start_us for event in step.events if event.kind in COPY_KINDS]
    return timing(step.schedule, _durations(step), mean(copies or [0.0])).makespan


def _is_range(name: str) -> bool:
    return name.startswith("PP:") or _OF_ONE_STAGE.fullmatch(name) is not None


def _ours(row: Mapping[str, Any]) -> TimelineEvent:
    facts, start = row["args"], float(row["ts"])
    return TimelineEvent(
        str(facts["device"]), "compute" if row["cat"] in _LETTERS else "copy", row["cat"], int(facts["microbatch"]),
        int(facts["partition"]), float(facts["issue_us"]), start, start + float(row["dur"]), int(facts["bytes"]),
    )  # fmt: skip


def _of_torch(row: Mapping[str, Any], rank: int) -> Iterator[TimelineEvent]:
    """The actions of a range, of which a pair has two; each takes an equal share of it."""
    name = _OF_ONE_STAGE.sub(lambda found: f"{rank}{found[1][0]}{found[2]}", row["name"])
    actions = _RANGE.findall(name.replace("OVERLAP_F_B", ""))
    start, length = float(row["ts"]), float(row["dur"]) / max(len(actions), 1)
    for number, (stage, kind, microbatch) in enumerate(actions):
        begin = start + number * length
        stream = "copy" if kind.startswith("RECV") else "compute"
        yield TimelineEvent(
            f"rank {rank}", stream, _TORCH[kind], int(microbatch), int(stage), -math.inf, begin, begin + length, 0
        )  # fmt: skip


def _on_device(event: TimelineEvent, device: int) -> TimelineEvent:
    values = event.to_dict() | {"partition": device}
    return TimelineEvent(**values)


def _action(event: TimelineEvent) -> Action:
    return Action(_LETTERS[event.kind], event.microbatch, event.partition)


def _host_time(step: Step, device: str) -> float:
    ends = {_action(event): event.end_us for event in step.computations}
    n = 1 + max(event.partition for event in step.events)
    free, lost = step.start_us, 0.0
    for event in step.computations:
        if event.device != device:
            continue
        ready = [ends[one] for group in needs(_action(event), n) for one in group if one in ends]
        lost += max(0.0, min(event.issue_us, event.start_us) - max([free, *ready]))
        free = max(free, event.end_us)
    return lost


def _durations(step: Step) -> list[Durations]:
    """The mean durations of each partition; of a backward pass that is not split, half is for inputs."""
    n = 1 + max(event.partition for event in step.events)
    times: dict[tuple[int, str], list[float]] = {}
    for event in step.computations:
        times.setdefault((event.partition, event.kind), []).append(event.end_us - event.start_us)
    means = {key: mean(values) for key, values in times.items()}
    found = []
    for j in range(n):
        half = means.get((j, "backward"), 0.0) / 2
        inputs, weights = means.get((j, "backward_inputs"), half), means.get((j, "backward_weights"), half)
        found.append(Durations(means.get((j, "forward"), 0.0), inputs, weights))
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
