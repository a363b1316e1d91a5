"""A traced step: one of our timelines or traces, or what the PyTorch profiler wrote on the ranks of a pipeline.

``torch.distributed.pipelining`` marks each action with a range such as ``PP:0F3``, or ``Forward 3`` where a rank has
one stage; there is a file for each rank. A range of the host also holds the time that its action waits for a message:

    rank 0   |------ F(0,0) ------|------ F(1,0) ------|
    rank 1   |-- waits -------------|----- F(0,1) ------|
                                    first operation

An action ends with its range. It starts with the first operation in its range. Where a trace has no operations, it
starts when what it needs has come and the action before it on its device has ended.

Clocks of ranks are compared by their messages: an action cannot begin before the one that it needs has ended on another
rank. Messages go both ways, so a clock that is ahead and one that is behind are both found.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from gpipe_bench.errors import ConfigError, TraceError
from gpipe_bench.results.breakdown import Interval
from gpipe_bench.results.timeline import COPY_KINDS, KINDS, TimelineEvent
from gpipe_bench.results.trace_lines import read_lines
from gpipe_bench.schedules import Action, Schedule
from gpipe_bench.schedules.actions import in_pairs, needs

_LETTERS: Final = {"forward": "F", "recompute": "R", "backward": "B", "backward_inputs": "I", "backward_weights": "W"}
_KINDS: Final = {letter: kind for kind, letter in _LETTERS.items()}
_RANGE: Final = re.compile(r"(\d+)(F|B|I|W|RECV_F|RECV_B)(\d+)")
_OF_ONE_STAGE: Final = re.compile(r"(Forward|Backward) (\d+)")
_MESSAGES: Final = re.compile(r"PP:(\d+)(SEND_F|RECV_B)\d+")
_CLOCK_ERROR: Final = 0.01, 1000.0
"""By how much the clocks of ranks may differ: a share of the step, and microseconds, whichever is more."""
_NAMED: Final = 5

_Operations = defaultdict[tuple[Any, Any], list[tuple[float, str]]]
"""Start and name of the operations of each process and thread."""


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One step of a trace.

    Attributes:
        devices: their names.
        events: of the step; ``partition`` is the pipeline's, ``device`` one of :attr:`devices`.
        on_host: whether the ranges are the host's, not those of a GPU.
        pairs: forward passes that share a range with the backward pass after them.
        overlap: of :func:`gpipe_bench.schedules.timing`. PyTorch sends the results of a pair when both have ended, so
            a pair is one action in its traces; it is two in ours.
        period_us: how long a step takes, from one to the next; None where a trace does not say. Where steps overlap, it
            is not :attr:`length_us`.
        flushes: how often the allocator of each device gave cached memory back, as far as a trace says.
    """

    devices: tuple[str, ...]
    events: tuple[TimelineEvent, ...]
    on_host: bool = False
    pairs: frozenset[Action] = frozenset()
    overlap: float | None = None
    period_us: float | None = None
    flushes: tuple[int, ...] = ()

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
        ordered = sorted(self.events, key=lambda event: (event.start_us, event.end_us))
        return (event for event in ordered if event.kind in _LETTERS)

    @property
    def schedule(self) -> Schedule:
        """The order in which the devices took their actions.

        A partition whose inputs need no gradients has W without I, but waits for the gradients of its results before W.
        An I of no duration stands where they had arrived, or after the pair that ran then.
        """
        found = {action_of(event): event for event in self.computations}
        n = 1 + max(action.j for action in found)
        order: list[tuple[float, float, str, tuple[Action, ...]]] = []
        for name in self.devices:
            units = in_pairs((action for action, event in found.items() if event.device == name), self.pairs)
            order += [(found[unit[0]].start_us, found[unit[-1]].end_us, name, unit) for unit in units]
        for action, event in found.items():
            inputs = Action("I", action.i, action.j)
            if action.kind == "W" and inputs not in found:
                ends = [found[one].end_us for one in chain.from_iterable(needs(inputs, n)) if one in found]
                time = min(max(ends), event.start_us)
                order.append((time, time, event.device, (inputs,)))
        order.sort()
        rows = (chain.from_iterable(one[3] for one in order if one[2] == name) for name in self.devices)
        return Schedule.of(rows, self.pairs)


def action_of(event: TimelineEvent) -> Action:
    """The action that a computation is."""
    return Action(_LETTERS[event.kind], event.microbatch, event.partition)


def read_step(paths: Sequence[Path]) -> TracedStep:
    """The last whole step of a trace: one file of ours, or the files of all ranks that the PyTorch profiler wrote.

    Args:
        paths: JSON files; names that end in ``.gz`` are compressed.

    Raises:
        ConfigError: a file is no trace, or has no action of a pipeline; the files lack an action, a stage or a rank,
            are of several replicas, or of clocks that differ.
        TraceError: a trace row by row cannot be read, or was cut.
    """
    traces = [_load(path, position) for position, path in enumerate(paths)]
    ours = [trace for trace in traces if trace.ours]
    if ours and len(traces) > 1:
        raise ConfigError([f"a timeline of ours must be explained alone, got {len(traces)} files; name {ours[0].path}"])
    step = _step_of_ours(ours[0]) if ours else _step_of_ranks(traces)
    _check_whole(step)
    return step


class _Range(NamedTuple):
    """A range of a rank: of one action, of both of a pair, or of a message that arrives.

    Attributes:
        name: as the trace has it.
        names: stage, kind and micro-batch of each action.
        start: when it began to compute, if the trace says so; else when the range began.
        end: not a number where the trace has none.
        came: when its inputs had come at the latest.
        left: when its results could leave.
    """

    name: str
    names: tuple[tuple[str, str, str], ...]
    start: float
    end: float
    came: float
    left: float


class _Pass(NamedTuple):
    """The range of an action, or of a pair, with its rank."""

    rank: int
    actions: tuple[Action, ...]
    range: _Range


@dataclass(frozen=True, slots=True)
class _Trace:
    """What a file holds.

    Attributes:
        path: the file.
        rank: as the profiler says it, or else the position among the files.
        groups: ranks of each process group that has several.
        ours: the events of a timeline of ours.
        placement: the device of the schedule for each partition, if the timeline says so.
        period_us: of a timeline of ours: how long a step takes, if it says so.
        flushes: of each device, likewise.
        steps: for each whole step the ranges of its computations.
        arrivals: likewise of its messages, where they are those of a GPU.
        on_host: whether the ranges are the host's.
        sending: stages that send activations to another rank, or receive gradients from one; '' where ranges do not
            say the stage.
        receiving: whether forward passes whose ranges do not say the stage receive activations from another rank.
    """

    path: Path
    rank: int
    groups: Collection[tuple[int, ...]]
    ours: Sequence[TimelineEvent]
    placement: Sequence[int]
    period_us: float | None
    flushes: tuple[int, ...]
    steps: Sequence[Sequence[_Range]]
    arrivals: Sequence[Sequence[_Range]]
    on_host: bool
    sending: Collection[str]
    receiving: bool


def _load(path: Path, position: int) -> _Trace:
    row_by_row = path.name.endswith((".jsonl", ".jsonl.gz"))
    try:
        trace = _tasks_of_rows(*read_lines(path)) if row_by_row else _json(path)
        rows = [row for row in trace["traceEvents"] if row.get("ph") in ("X", "B")]
        ours = [_event_of_ours(row) for row in rows if row.get("cat") in KINDS and "partition" in row.get("args", {})]
        told = trace.get("otherData", {})
        placement = [int(device) for device in told.get("placement", "").split("-") if device]
        period_us = float(told["step_time_ms"]) * 1e3 if "step_time_ms" in told else None
        group = trace.get("distributedInfo", {})
        world = tuple(range(group.get("world_size", 1)))
        groups = {world, *(tuple(sorted(one.get("ranks", ()))) for one in group.get("pg_config", ()))}
        ranges = [row for row in rows if _is_range(str(row.get("name", "")))]
        on_gpu = [row for row in ranges if row.get("cat") == "gpu_user_annotation"]
        on_host = [row for row in ranges if row.get("cat") != "gpu_user_annotation" and _is_pass(row)]
        operations = _operations(rows)
        passes = map(_range_on_gpu, _of_one_stream(on_gpu, rows)) if on_gpu else _ranges_on_host(on_host, operations)
        sent = [_MESSAGES.fullmatch(str(row.get("name", ""))) for row in rows]
        within = _of_forward(on_host, operations)
        read = _Trace(
            path, group.get("rank", position), [one for one in groups if len(one) > 1], ours, placement,
            period_us, tuple(told.get("flushes", ())),
            _steps(passes), _steps(_range_on_gpu(row) for row in on_gpu if not _is_pass(row)),
            not on_gpu, {one[1] for one in sent if one} or {j for j, names in within.items() if "c10d::send" in names},
            "c10d::recv_" in within.get("", ()),
        )  # fmt: skip
    except TraceError:
        raise
    except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        rule = "each line of a trace must be a row" if row_by_row else "trace must be a Chrome trace in JSON"
        change = "write it by simulate or emulate --trace" if row_by_row else "name another"
        raise ConfigError([f"{rule}, got {path} ({reason}); {change}"]) from error
    if not (read.steps or any(event.kind in _LETTERS for event in ours)):
        rule = "trace must have actions of a pipeline: a timeline of ours, or ranges such as PP:0F3"
        change = "trace pipe.step, or schedule.step with torch.profiler; Schedule1F1B has no ranges, so mark its stages"
        raise ConfigError([f"{rule}, got none in {path}; {change}"])
    return read


def _json(path: Path) -> Any:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def _check_lengths(path: Path, ends: Iterable[tuple[str, float]]) -> None:
    if without := [name for name, end in ends if math.isnan(end)]:
        got = f"none for {', '.join(without[:_NAMED])} in {path}"
        change = "trace again, and end the profiler after the step, or give each event a dur"
        raise ConfigError([f"ranges of a step must have a duration, got {got}; {change}"])


def _tasks_of_rows(head: Mapping[str, Any], lines: Sequence[Any]) -> dict[str, Any]:
    """The tasks of the last step of a trace row by row, as a timeline of ours."""
    marks = [place for place, line in enumerate(lines) if line["kind"] == "mark"]
    tasks: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in lines[slice(*marks[-2:]) if len(marks) > 1 else slice(None)]:
        if line.get("of") in KINDS and "begin_ns" in line:
            tasks[line["task"]].append(line)
    events = []
    for rows in tasks.values():
        first, begin = rows[0], min(row["begin_ns"] for row in rows)
        device = f"cuda:{first['device']}"
        facts = {name: first[name] for name in ("microbatch", "partition")}
        facts |= {"device": device, "issue_us": min(row["host_ns"] for row in rows) / 1e3, "bytes": 0}
        length = max(row["end_ns"] for row in rows) - begin
        events.append({"ph": "X", "cat": first["of"], "ts": begin / 1e3, "dur": length / 1e3, "args": facts})
    told: dict[str, Any] = {"flushes": [device["flushes"] for device in head.get("memory", ())]}
    if "step_ns" in head:
        told["step_time_ms"] = head["step_ns"] / 1e6
    return {"traceEvents": events, "otherData": told}


def _is_range(name: str) -> bool:
    return (name.startswith("PP:") and _RANGE.search(name) is not None) or _OF_ONE_STAGE.fullmatch(name) is not None


def _is_pass(row: Mapping[str, Any]) -> bool:
    return "RECV" not in row["name"]


def _range_on_gpu(row: Mapping[str, Any]) -> _Range:
    """The range of a row, whose kernels wait before they begin; where it does not say the stage, that is empty."""
    one = _OF_ONE_STAGE.fullmatch(row["name"])
    start = float(row["ts"])
    end = start + float(row.get("dur", math.nan))
    names = (("", one[1][0], one[2]),) if one else tuple(_RANGE.findall(row["name"]))
    return _Range(row["name"], names, start, end, start, end)


def _operations(rows: Iterable[Mapping[str, Any]]) -> _Operations:
    """The operations in their order."""
    operations: _Operations = defaultdict(list)
    for row in rows:
        if row.get("cat") == "cpu_op":
            operations[row["pid"], row["tid"]].append((float(row["ts"]), str(row["name"])))
    for found in operations.values():
        found.sort()
    return operations


def _between(operations: Sequence[tuple[float, str]], start: float, end: float) -> Sequence[tuple[float, str]]:
    return operations[bisect_left(operations, (start, "")) : bisect_left(operations, (end, ""))]


def _of_forward(ranges: Iterable[Mapping[str, Any]], operations: _Operations) -> dict[str, set[str]]:
    """Of each stage the operations that all of its forward passes have, up to the beginning of the pass that follows.

    Schedules that mark no messages send the result of a forward pass then.
    """
    threads: defaultdict[tuple[Any, Any], list[_Range]] = defaultdict(list)
    for row in ranges:
        threads[row.get("pid"), row.get("tid")].append(_range_on_gpu(row))
    found: dict[str, set[str]] = {}
    for thread, own in threads.items():
        for one, following in pairwise(sorted(own, key=lambda one: one.start)):
            if len(one.names) == 1 and one.names[0][1] == "F":
                names = {name for _, name in _between(operations[thread], one.start, following.start)}
                found[one.names[0][0]] = found.get(one.names[0][0], names) & names
    return found


def _ranges_on_host(ranges: Iterable[Mapping[str, Any]], operations: _Operations) -> Iterator[_Range]:
    """The ranges of passes; each waits for its messages before its first operation, and then computes, and may send."""
    for row in ranges:
        one = _range_on_gpu(row)
        within = _between(operations[row.get("pid"), row.get("tid")], one.start, one.end)
        began = next((time for time, name in within if not name.startswith("c10d::")), None)
        left = next((time for time, name in within if name == "c10d::send"), one.end)
        times = (one.start, one.end) if began is None else (began, began)
        yield one._replace(start=times[0], came=times[1], left=left)


def _of_one_stream(ranges: Iterable[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The ranges of passes on the stream that computes: NCCL's and FSDP's streams have ranges of the same names.

    It is the stream with the most time in kernels that are not NCCL's, or else the one with the most passes.
    """
    work: defaultdict[tuple[Any, Any], float] = defaultdict(float)
    for row in rows:
        if row.get("cat") == "kernel" and not str(row["name"]).startswith("nccl"):
            work[row["pid"], row["tid"]] += float(row.get("dur", 0))
    streams: defaultdict[tuple[Any, Any], list[Mapping[str, Any]]] = defaultdict(list)
    for row in filter(_is_pass, ranges):
        streams[row.get("pid"), row.get("tid")].append(row)

    def weight(stream: tuple[Any, Any]) -> tuple[float, int, float]:
        own = streams[stream]
        return work[stream], len({row["name"] for row in own}), sum(float(row.get("dur", 0)) for row in own)

    return streams[max(streams, key=weight)] if streams else []


def _steps(ranges: Iterable[_Range]) -> list[list[_Range]]:
    """The steps that have the most ranges; a step begins with a name that its predecessor has.

    A trace may begin within a step: then backward passes come first whose forward passes it lacks.
    """
    steps: list[dict[tuple[tuple[str, str, str], ...], _Range]] = [{}]
    forward: set[tuple[str, str]] = set()
    for one in sorted(ranges, key=lambda one: one.start):
        if one.names in steps[-1]:
            steps.append({})
            forward.clear()
        forward |= {(stage, i) for stage, kind, i in one.names if kind == "F"}
        if all(kind.startswith("RECV") or (stage, i) in forward for stage, kind, i in one.names):
            steps[-1][one.names] = one
        else:
            steps[-1].clear()
            forward.clear()
    most = max(map(len, steps))
    return [[*step.values()] for step in steps if len(step) == most > 0]


def _nearest(steps: Sequence[Sequence[_Range]], start: float) -> Sequence[_Range]:
    """The step whose start is nearest."""
    return min(steps, key=lambda step: abs(step[0].start - start), default=())


def _step_of_ours(trace: _Trace) -> TracedStep:
    _check_lengths(trace.path, ((f"{one.kind} of micro-batch {one.microbatch}", one.end_us) for one in trace.ours))
    ordered = sorted(trace.ours, key=lambda event: event.start_us)
    found = {(event.kind, event.microbatch, event.partition): event for event in ordered}
    device_of = {event.partition: event.device for event in found.values() if event.kind in _LETTERS}
    if trace.placement and len(trace.placement) > max(device_of, default=-1):
        device_of = {j: f"device {trace.placement[j]} ({name})" for j, name in device_of.items()}
    return _step(found.values(), device_of, period_us=trace.period_us, flushes=trace.flushes)


def _step(events: Collection[TimelineEvent], device_of: Mapping[int, str], **facts: Any) -> TracedStep:
    placed = [replace(event, device=device_of[event.partition]) for event in events if event.partition in device_of]
    return TracedStep(tuple(dict.fromkeys(device_of[j] for j in sorted(device_of))), tuple(placed), **facts)


def _event_of_ours(row: Mapping[str, Any]) -> TimelineEvent:
    facts, start = row["args"], float(row["ts"])
    return TimelineEvent(
        str(facts["device"]), "compute" if row["cat"] in _LETTERS else "copy", row["cat"], int(facts["microbatch"]),
        int(facts["partition"]), float(facts["issue_us"]), start, start + float(row.get("dur", math.nan)),
        int(facts["bytes"]),
    )  # fmt: skip


def _step_of_ranks(traces: Sequence[_Trace]) -> TracedStep:
    """The step of the ranks of one pipeline."""
    ranks = _checked_ranks(traces)
    _check_neighbours(traces)
    device_of: dict[int, str] = {}
    owners: dict[Action, int] = {}
    passes: list[_Pass] = []
    arrivals: list[tuple[int, _Range]] = []
    # A profiler may end on one rank before it has seen the last step of another.
    start = min(trace.steps[-1][0].start for trace in traces)
    for trace in traces:
        step = _nearest(trace.steps, start)
        messages = _nearest(trace.arrivals, start)
        _check_lengths(trace.path, ((one.name, one.end) for one in (*step, *messages)))
        arrivals += [(trace.rank, one) for one in messages]
        for one in step:
            actions = [Action(kind, int(i), int(j or ranks.index(trace.rank))) for j, kind, i in one.names]
            passes.append(_Pass(trace.rank, tuple(actions), one))
            for action in actions:
                device_of[action.j] = f"rank {trace.rank}"
                if owners.setdefault(action, trace.rank) != trace.rank:
                    got = f"{action} on ranks {owners[action]} and {trace.rank}, which are replicas"
                    raise ConfigError([f"traces must be of one pipeline, got {got}; name the files of one replica"])
    following = {int(stage) + 1 for trace in traces for stage in trace.sending if stage}
    if missing := sorted({*range(max(device_of)), *following} - device_of.keys()):
        raise ConfigError([f"traces must have all stages, got none of {missing}; name the files of all ranks"])
    n = 1 + max(device_of)
    times, results = _times(passes, n)
    copies = [_copy(one, results, n) for _, one in arrivals]
    came = [(one.rank, action, one.range.came if action == one.actions[0] else one.range.end)
            for one in passes for action in one.actions]  # fmt: skip
    came += [(rank, _receiver(one), one.end) for rank, one in arrivals]
    _check_clocks(came, results, owners, n)
    events = [_event(_KINDS[action.kind], action.i, action.j, *time) for action, time in times.items()]
    pairs = frozenset(one.actions[0] for one in passes if len(one.actions) > 1)
    on_host = any(trace.on_host for trace in traces)
    return _step([*events, *copies], device_of, on_host=on_host, pairs=pairs, overlap=1.0)


def _checked_ranks(traces: Sequence[_Trace]) -> list[int]:
    """The ranks of the files, in order.

    Raises:
        ConfigError: one is there twice; some of a process group are not; ranges without a stage may be of replicas.
    """
    ranks = sorted(trace.rank for trace in traces)
    if len(set(ranks)) < len(ranks):
        raise ConfigError([f"traces must be of different ranks, got {ranks}; name a file for each rank"])
    groups = sorted({group for trace in traces for group in trace.groups}, key=len)
    around = [group for group in groups if set(ranks) < set(group)]
    if around and tuple(ranks) not in groups:
        missing = [rank for rank in around[0] if rank not in ranks]
        got = f"none of rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}"
        raise ConfigError([f"traces must be of all ranks of a pipeline, got {got}; name their files, too"])
    inside = [list(group) for group in groups if set(group) < set(ranks)]
    if inside and any(not stage for trace in traces for one in trace.steps[-1] for stage, _, _ in one.names):
        got = f"those of {ranks}, which have groups {', '.join(map(str, inside[:_NAMED]))}"
        rule = "traces whose ranges say no stage, such as Forward 3, must be of one pipeline without replicas"
        raise ConfigError([f"{rule}, got {got}; name the files of one replica"])
    return ranks


def _check_neighbours(traces: Sequence[_Trace]) -> None:
    """Refuse ranks in an order that their messages deny, where ranges do not say the stage.

    The first rank is the only one that receives no activations, and the last one the only one that sends none. Traces
    without messages are taken for those of all ranks, in their order.
    """
    ordered = sorted(traces, key=lambda trace: trace.rank)
    first, last = ordered[0], ordered[-1]
    if not any(trace.receiving or "" in trace.sending for trace in ordered):
        return
    missing = [f"the rank before that of {first.path}, which receives activations"] if first.receiving else []
    missing += [f"the rank after that of {last.path}, which sends activations"] if "" in last.sending else []
    if missing:
        rule = "traces must be of all ranks of a pipeline, in the order of their stages"
        raise ConfigError([f"{rule}, got none of {' and '.join(missing)}; name their files, too"])
    ends = [trace for trace in ordered[1:] if not trace.receiving]
    ends += [trace for trace in ordered[:-1] if "" not in trace.sending]
    if ends:
        rule = "traces must be of one pipeline, in the order of its stages"
        got = f"{ends[0].path} in between, which is of the first or the last stage"
        raise ConfigError([f"{rule}, got {got}; name the files of one replica, in order"])


def _event(kind: str, i: int, j: int, start: float, end: float) -> TimelineEvent:
    return TimelineEvent("", "copy" if kind in COPY_KINDS else "compute", kind, i, j, -math.inf, start, end, 0)


def _times(passes: Sequence[_Pass], n: int) -> tuple[dict[Action, Interval], dict[Action, float]]:
    """Start and end of each action, and when its result may leave the rank.

    The range of a pair says when both have ended, and their results leave the rank then. The first of them takes as
    long as others of its kind and stage take alone.
    """
    times: dict[Action, Interval] = {}
    results: dict[Action, float] = {}
    free: defaultdict[int, float] = defaultdict(lambda: -math.inf)
    alone: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    pairs: list[tuple[Action, Action, float, float]] = []

    def start(action: Action, earliest: float, end: float) -> float:
        ready = [results[other] for group in needs(action, n) for other in group if other in results]
        return min(max([earliest, *ready]), end)

    for rank, (first, *others), one in sorted(passes, key=lambda one: one.range.end):
        begin = start(first, max(one.start, free[rank]), one.end)
        free[rank] = one.end
        if others:
            pairs.append((first, others[0], begin, one.end))
        else:
            times[first] = begin, one.end
            alone[first.kind, first.j].append(one.end - begin)
        results |= dict.fromkeys((first, *others), one.left)
    for first, second, begin, end in pairs:
        known = [alone[one.kind, one.j] for one in (first, second)]
        rest = end - begin - median(known[1]) if known[1] else (end - begin) / 2
        middle = begin + min(max(median(known[0]) if known[0] else rest, 0.0), end - begin)
        times[first], times[second] = (begin, middle), (start(second, middle, end), end)
    return times, results


def _receiver(arrival: _Range) -> Action:
    """The action that waits for a message; a backward pass is taken to be I."""
    ((j, kind, i),) = arrival.names
    return Action("F" if kind == "RECV_F" else "I", int(i), int(j))


def _copy(arrival: _Range, results: Mapping[Action, float], n: int) -> TimelineEvent:
    """A message that arrives; its kernel waits from its launch until the result has been sent."""
    kind, i, j = receiver = _receiver(arrival)
    sent = [results[one] for one in chain.from_iterable(needs(receiver, n)) if one.j != j and one in results]
    start = min(max([arrival.start, *sent]), arrival.end)
    return _event("copy" if kind == "F" else "copy_grad", i, j, start, arrival.end)


def _check_clocks(
    came: Sequence[tuple[int, Action, float]], results: Mapping[Action, float], owners: Mapping[Action, int], n: int
) -> None:
    """Refuse traces in which inputs of an action have come to its rank before another rank had sent them.

    Args:
        came: rank, action, and when its inputs had come.
        results: when the result of each action could leave its rank.
        owners: the rank of each action.
        n: stages.
    """
    share, least = _CLOCK_ERROR
    length = max(results.values()) - min(time for _, _, time in came)
    allowed = max(share * length, least)
    early = [
        (results[other] - time, action, rank, other)
        for rank, action, time in came
        for other in chain.from_iterable(needs(action, n))
        if owners.get(other, rank) != rank
    ]
    by, action, rank, other = max(early, default=(0.0, None, 0, None))
    if by > allowed and other is not None:
        got = f"{action} on rank {rank} that has {other} {by / 1000:.3f} ms before rank {owners[other]} sends it"
        if by > length / 4:
            raise ConfigError([f"traces must be of the same step, got {got}; trace whole steps of all ranks"])
        rule = f"traces must be of the same step, and of clocks that agree within {allowed / 1000:.3g} ms"
        raise ConfigError([f"{rule}, got {got}; trace a step of all ranks on one host, or set their clocks"])


def _check_whole(step: TracedStep) -> None:
    """Every micro-batch passes every partition; one without gradients has no backward passes, or W alone."""
    found = {action_of(event) for event in step.computations}
    m, n = (1 + max(numbers) for numbers in zip(*((action.i, action.j) for action in found), strict=True))
    kinds = {(action.kind, action.j) for action in found}
    missing = ["backward pass"] if not any(kind in "BIW" for kind, _ in kinds) else []
    for j in range(n):
        wanted = ["F", *(["BW"] if kinds & {("B", j), ("W", j)} else []), *(["IB"] if ("I", j) in kinds else [])]
        missing += [
            str(Action(letters[0], i, j))
            for letters in wanted
            for i in range(m)
            if found.isdisjoint(Action(letter, i, j) for letter in letters)
        ]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        got = f"no {', '.join(missing[:_NAMED])}{more}"
        raise ConfigError([f"a trace must have all actions of a training step, got {got}; trace a whole step"])
