"""The engine's tasks in a trace: which rows a task issued, and when they ran in virtual time."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpipe_bench.emulator.library import backend, thread_index
from gpipe_bench.engine.observer import Task
from gpipe_bench.machine.replay import Replayed
from gpipe_bench.machine.trace import KINDS, TracedTask
from gpipe_bench.results.breakdown import covered, split_device_time
from gpipe_bench.results.timeline import TimelineEvent
from gpipe_bench.step.result import Busy

_KERNEL, _COPY, _BACKWARD = (KINDS.index(kind) for kind in ("kernel", "copy", "backward"))
_NS_PER_US = 1e3


@dataclass(slots=True)
class Span:
    """A task, and the rows that were issued while it was.

    Attributes:
        task: its description by the engine.
        thread: the host thread that issued it, as the trace numbers threads.
        first: row of the trace.
        end: row after its last one.
        nbytes: bytes that a copy moved or a forward pass produced.
    """

    task: Task
    thread: int
    first: int
    end: int = 0
    nbytes: int = 0


class TaskRows:
    """An observer that notes the rows of each task while a trace is recorded; any thread may call it.

    Attributes:
        spans: in the order in which the tasks began.
    """

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._lock = threading.Lock()

    def start(self, task: Task) -> Span:
        """Note that a task is about to be issued."""
        span = Span(task, thread_index(), int(backend().vd_trace_size()))
        with self._lock:
            self.spans.append(span)
        return span

    def finish(self, token: Span, nbytes: int) -> None:
        """Note that all of a task was issued; of several calls for one token the last counts."""
        token.end, token.nbytes = int(backend().vd_trace_size()), nbytes


def task_events(
    spans: Iterable[Span], replayed: Replayed, issued: Mapping[int, ThreadRows], zero_ns: int = 0
) -> list[TimelineEvent]:
    """The tasks as events, in the order of starts; a task that issued nothing is none.

    A task starts with the first kernel or copy that its thread issued on its stream, and ends with the last one.

    Args:
        spans: of some tasks.
        replayed: their trace in virtual time.
        issued: the rows of each host thread in it, from :func:`issued_rows`.
        zero_ns: start of the events' clock.
    """
    events = []
    for span in spans:
        rows = list(_rows(span, replayed, issued[span.thread]))
        if rows:
            times = (min(replayed.host_ns[row] for row in rows), min(replayed.begin_ns[row] for row in rows),
                     max(replayed.end_ns[row] for row in rows))  # fmt: skip
            events.append(_event(span, [(time - zero_ns) / _NS_PER_US for time in times]))
    return sorted(events, key=lambda event: (event.start_us, event.end_us, event.partition))


def name_tasks(spans: Iterable[Span], replayed: Replayed, issued: Mapping[int, ThreadRows]) -> None:
    """Let the rows of a trace say which tasks they belong to, after it was replayed."""
    trace = replayed.trace
    for number, span in enumerate(spans, 1):
        task = span.task
        aside = task.lane == "copy"
        trace.tasks.append(
            TracedTask(task.kind, task.microbatch, task.partition, task.device.index, aside, span.nbytes)
        )
        for place in _rows(span, replayed, issued[span.thread]):
            trace.rows[place].task = number


def busy_devices(events: Sequence[TimelineEvent], devices: Sequence[int], length_us: float) -> list[Busy]:
    """The use of each device, by its number, in a step of that length.

    Args:
        events: of the step, whose start is zero.
        devices: device of each partition.
        length_us: of the step.
    """
    length_ns = round(length_us * _NS_PER_US)
    own = [replace(event, partition=devices[event.partition]) for event in events]
    shares = split_device_time(own, max(devices) + 1, 0, length_us)
    return [
        Busy(
            round(share.compute_fraction * length_ns),
            round(share.recompute_fraction * length_ns),
            round(share.copy_fraction * length_ns),
            round(covered(_running(events, device, length_us)) * _NS_PER_US),
        )
        for device, share in enumerate(shares)
    ]


def _running(events: Sequence[TimelineEvent], device: int, length_us: float) -> Iterator[tuple[float, float]]:
    """When a device ran a task, or a copy that it sends; a device may run tasks of a step before it, or after it."""
    for event in events:
        if event.device == f"cuda:{device}" and event.end_us > 0 and event.start_us < length_us:
            yield max(event.start_us, 0.0), min(event.end_us, length_us)


@dataclass(slots=True)
class ThreadRows:
    """Rows of a host thread.

    Attributes:
        own: all that it issued, in the order of the trace.
        work: kernels and copies that it or a backward pass of its issued, in the order of virtual time.
    """

    own: list[int] = field(default_factory=list)
    work: list[int] = field(default_factory=list)


def issued_rows(replayed: Replayed) -> dict[int, ThreadRows]:
    """The rows of each host thread."""
    found: dict[int, ThreadRows] = defaultdict(ThreadRows)
    callers: dict[int, int] = {}
    for place, row in enumerate(replayed.trace.rows):
        found[row.thread].own.append(place)
        if row.kind == _BACKWARD:
            callers[row.version] = row.thread
        elif row.kind in (_KERNEL, _COPY):
            for thread in {row.thread, callers.get(getattr(row, "pass"), row.thread)}:
                found[thread].work.append(place)
    for rows in found.values():
        rows.work.sort(key=replayed.turn.__getitem__)
    return found


def _rows(span: Span, replayed: Replayed, issued: ThreadRows) -> Iterator[int]:
    """The rows of a task: what its thread came to between its start and its end, in virtual time."""
    task, turn = span.task, replayed.turn.__getitem__
    streams = {(one.device.index, one.stream_id) for one in (task.stream, task.end_stream) if one is not None}
    counts = (bisect_left(issued.own, place) for place in (span.first, span.end))
    turns = (turn(issued.own[count - 1]) if count else 0 for count in counts)
    first, end = (bisect_right(issued.work, reached, key=turn) for reached in turns)
    for place in issued.work[first:end]:
        row = replayed.trace.rows[place]
        if (row.device, row.stream) in streams or (row.kind == _COPY and (row.peer, row.peer_stream) in streams):
            yield place


def _event(span: Span, times_us: Sequence[float]) -> TimelineEvent:
    task, (issue_us, start_us, end_us) = span.task, times_us
    return TimelineEvent(
        device=f"cuda:{task.device.index}",
        stream=task.lane,
        kind=task.kind,
        microbatch=task.microbatch,
        partition=task.partition,
        issue_us=issue_us,
        start_us=start_us,
        end_us=end_us,
        bytes=span.nbytes,
    )
