"""The measured timeline: an observer that notes when each task was issued, started and ended.

Without streams (CPU) a task runs while it is issued, so the host clock says it all. On a stream the host only queues
work; there two events enclose the task in the stream, and nothing waits for them until the record is read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Final

import torch

from gpipe_bench.engine.observer import Task
from gpipe_bench.results.timeline import TimelineEvent

NewEvent = Callable[[torch.device], torch.Event]

_TRIES: Final = 16
_NS_PER_MS: Final = 1e6
_NS_PER_US: Final = 1e3


def timing_event(device: torch.device) -> torch.Event:
    """An event of ``device`` that measures time."""
    return torch.Event(device, enable_timing=True)


@dataclass(frozen=True, slots=True)
class EventClock:
    """Turns events of one device into host time: one zero for devices and host, found without stopping anything.

    Events of one device measure time between each other, never the time of day. So when a record has ended, a marker
    event M is queued on the idle device and waited for, with the host clock read before (b) and after (a):

        host    b ────────────────── a            b <= M <= a, so M = (a + b) / 2, wrong by (a - b) / 2 at most
        device  ── first ──── ... ── M ──

    The narrowest of several tries counts. An event E then stands at M - elapsed(first, M) + elapsed(first, E). The
    bound is some 10 us on today's GPUs. Elapsed times are 32-bit milliseconds: 0.06 us fine 1 s after ``first``, ten
    times coarser after 10 s. (Refused: a marker at the start, which would have to stop the device inside a step; the
    calendar clocks of profilers, which need CUPTI.)

    Attributes:
        first: an event of the device; others are measured from it.
        first_ns: host time of ``first``, in nanoseconds of :func:`time.perf_counter_ns`.
        error_ns: bound of the error of ``first_ns``.
    """

    first: torch.Event
    first_ns: float
    error_ns: float

    @classmethod
    def calibrate(
        cls,
        first: torch.Event,
        stream: torch.Stream,
        *,
        new_event: NewEvent = timing_event,
        host_ns: Callable[[], int] = perf_counter_ns,
    ) -> EventClock:
        """Find the host time of ``first``.

        Args:
            first: a recorded event of the device.
            stream: a stream of the device with nothing left to do.
            new_event: makes an event.
            host_ns: reads the host clock, in nanoseconds.
        """
        tries = [cls._try(first, stream, new_event, host_ns) for _ in range(_TRIES)]
        return min(tries, key=lambda clock: clock.error_ns)

    @classmethod
    def _try(
        cls, first: torch.Event, stream: torch.Stream, new_event: NewEvent, host_ns: Callable[[], int]
    ) -> EventClock:
        marker = new_event(stream.device)
        before = host_ns()
        marker.record(stream)
        marker.synchronize()
        after = host_ns()
        elapsed_ns = first.elapsed_time(marker) * _NS_PER_MS
        return cls(first, (before + after) / 2 - elapsed_ns, (after - before) / 2)

    def host_ns(self, event: torch.Event) -> float:
        """Host time at which the device reached ``event``, in nanoseconds."""
        return self.first_ns + self.first.elapsed_time(event) * _NS_PER_MS


@dataclass(slots=True, eq=False)
class TimedTask:
    """A task under observation: the token between start and finish."""

    task: Task
    issue_ns: int = 0
    end_ns: int | None = None
    nbytes: int = 0
    first: torch.Event | None = None
    last: torch.Event | None = None


class Recorder:
    """Records the tasks of one step (an :class:`gpipe_bench.engine.observer.Observer`); any thread may call it.

    Use a new one for each step, so that its events are those of the step. The zero of all times is the moment of
    construction.

    Args:
        new_event: makes a timing event of a device; for accelerators that ``torch.Event`` does not serve.
    """

    def __init__(self, *, new_event: NewEvent = timing_event) -> None:
        self._new_event = new_event
        self._lock = threading.Lock()
        self._tasks: list[TimedTask] = []
        self._error_us: dict[str, float] = {}
        self._zero_ns = perf_counter_ns()

    @property
    def zero_ns(self) -> int:
        """The zero of all times on the host clock."""
        return self._zero_ns

    @property
    def clock_error_us(self) -> dict[str, float]:
        """For each accelerator, how far its events may be off the host clock; known once :meth:`events` was read."""
        return dict(self._error_us)

    def start(self, task: Task) -> TimedTask:
        """Note that ``task`` is about to be issued."""
        timed = TimedTask(task)
        with self._lock:
            self._tasks.append(timed)
        timed.issue_ns = perf_counter_ns()
        if task.stream is not None:
            timed.first = self._new_event(task.stream.device)
            timed.first.record(task.stream)
        return timed

    def finish(self, token: TimedTask, nbytes: int) -> None:
        """Note that all of a task was issued; of several calls for one token the last counts.

        Args:
            token: what :meth:`start` returned.
            nbytes: bytes of the task.
        """
        end_ns = perf_counter_ns()
        stream = token.task.end_stream or token.task.stream
        if stream is not None:
            if token.last is None:
                token.last = self._new_event(stream.device)
            token.last.record(stream)
        token.nbytes = nbytes
        token.end_ns = end_ns

    def events(self) -> list[TimelineEvent]:
        """The finished record, in the order of starts; waits for the devices.

        Raises:
            RuntimeError: a task was started and never finished. Nothing is dropped: a timeline with holes would
                pass for idle time.
        """
        with self._lock:
            tasks = list(self._tasks)
        if unfinished := [timed.task for timed in tasks if timed.end_ns is None]:
            names = ", ".join(f"{task.kind} ({task.microbatch},{task.partition})" for task in unfinished)
            raise RuntimeError(
                f"every task must be finished before its events are read, got {len(unfinished)} unfinished: {names}; "
                "read the events after the step, and drop the record of a step that failed"
            )
        for timed in tasks:
            if timed.last is not None:
                timed.last.synchronize()
        clocks = self._clocks(tasks)
        events = [self._event(timed, clocks) for timed in tasks]
        return sorted(events, key=lambda event: (event.start_us, event.end_us, event.partition))

    def _clocks(self, tasks: list[TimedTask]) -> dict[torch.device, EventClock]:
        clocks: dict[torch.device, EventClock] = {}
        for timed in tasks:
            task = timed.task
            for stream, event in ((task.stream, timed.first), (task.end_stream, timed.last)):
                if stream is not None and event is not None and stream.device not in clocks:
                    clock = EventClock.calibrate(event, stream, new_event=self._new_event)
                    clocks[stream.device] = clock
                    self._error_us[str(stream.device)] = clock.error_ns / _NS_PER_US
        return clocks

    def _event(self, timed: TimedTask, clocks: dict[torch.device, EventClock]) -> TimelineEvent:
        task = timed.task
        start_ns: float = timed.issue_ns
        end_ns: float = timed.issue_ns if timed.end_ns is None else timed.end_ns
        if task.stream is not None and timed.first is not None and timed.last is not None:
            ended = task.end_stream or task.stream
            start_ns = clocks[task.stream.device].host_ns(timed.first)
            # Clocks of two devices: a copy must not end before it starts by their error.
            end_ns = max(start_ns, clocks[ended.device].host_ns(timed.last))
        return TimelineEvent(
            device=str(task.device),
            stream=task.lane,
            kind=task.kind,
            microbatch=task.microbatch,
            partition=task.partition,
            issue_us=self._us(timed.issue_ns),
            start_us=self._us(start_ns),
            end_us=self._us(end_ns),
            bytes=timed.nbytes,
        )

    def _us(self, host_ns: float) -> float:
        return (host_ns - self._zero_ns) / _NS_PER_US
