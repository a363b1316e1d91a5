"""The measured timeline: an observer that notes when each task was issued, started and ended.

Without streams (CPU) a task runs while it is issued, so the host clock says it all. On a stream the host only queues
work; there two events enclose the task in the stream, and nothing waits for them until the record is read.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from time import perf_counter_ns

import torch

from gpipe_bench.engine.observer import Task
from gpipe_bench.measure.event_clock import EventClock, NewEvent, timing_event
from gpipe_bench.results.timeline import TimelineEvent

_NS_PER_US = 1e3


@dataclass(slots=True, eq=False)
class TimedTask:
    """A task under observation: the token between start and finish."""

    task: Task
    issue_ns: int = 0
    end_ns: int | None = None
    nbytes: int = 0
    first: torch.Event | None = None
    last: torch.Event | None = None

    @property
    def finished(self) -> bool:
        """Whether finish was called, once or more."""
        return self.end_ns is not None


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

    def now_us(self) -> float:
        """The present on the clock of the events, in microseconds: reads the bounds of a step, devices synchronised."""
        return self._us(perf_counter_ns())

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
        _check_finished(tasks)
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


def _check_finished(tasks: list[TimedTask]) -> None:
    open_tasks = [timed.task for timed in tasks if not timed.finished]
    if open_tasks:
        names = ", ".join(f"{task.kind} ({task.microbatch},{task.partition})" for task in open_tasks)
        raise RuntimeError(
            f"every task must be finished before its events are read, got {len(open_tasks)} unfinished: {names}; "
            "read the events after the step, and drop the record of a step that failed"
        )
