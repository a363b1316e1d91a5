"""The tasks of a run; objects are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from gpipe_bench.machine.replay import TaskTimes
from gpipe_bench.machine.trace import TracedTask
from gpipe_bench.results.breakdown import covered
from gpipe_bench.results.timeline import COPY_KINDS, TimelineEvent
from gpipe_bench.step.result import Busy


@dataclass(frozen=True, slots=True)
class TimedTask:
    """A task as a host thread issued it.

    Attributes:
        kind: one of :data:`gpipe_bench.results.timeline.KINDS`.
        i: micro-batch.
        j: partition.
        device: the device that runs it, for a copy the sender's.
        stream: ``compute`` or ``copy``.
        issue_ns: when it was issued.
        start_ns: when its first operation began.
        end_ns: when its last operation had ended.
        nbytes: bytes moved by a copy, or of the results of a forward pass.
    """

    kind: str
    i: int
    j: int
    device: int
    stream: str
    issue_ns: int
    start_ns: int
    end_ns: int
    nbytes: int


class Tasks(Sequence[TimedTask]):
    """Tasks in the order in which host threads issued them, made when somebody asks for them.

    Args:
        tasks: of a trace, step by step.
        times: when they ran.
        devices: of each partition.
    """

    def __init__(self, tasks: Sequence[TracedTask], times: TaskTimes, devices: Sequence[int]) -> None:
        self._devices, self._tasks, self._times = devices, tasks, times
        turn = times.turn
        self._order = sorted((place for place in range(len(tasks)) if turn[place] >= 0), key=turn.__getitem__)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[TimedTask]:
        return self.between(0, len(self))

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def between(self, first: int, last: int) -> Iterator[TimedTask]:
        """Those from ``first`` to before ``last``."""
        issue, start, end, _ = self._times
        for place in self._order[first:last]:
            task = self._tasks[place]
            stream = "copy" if task.aside else "compute"
            times = issue[place], start[place], end[place]
            yield TimedTask(task.kind, task.i, task.j, task.device, stream, *times, task.nbytes)

    def step_ends(self, steps: int) -> tuple[int, ...]:
        """When the last task of each step, and of those before, had ended; all steps have as many tasks."""
        end, each = self._times.end_ns, len(self) // steps
        own = (max(map(end.__getitem__, self._order[each * step : each * (step + 1)])) for step in range(steps))
        return tuple(accumulate(own, max))

    def busy(self, first: int, last: int, start_ns: int, end_ns: int) -> list[Busy]:
        """The use of each device by some of them from one time to another. Computations of one device never overlap."""
        count = max(self._devices) + 1
        compute, recompute = [0] * count, [0] * count
        own: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        running: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        for place in self._order[first:last]:
            task = self._tasks[place]
            span = max(self._times.start_ns[place], start_ns), min(self._times.end_ns[place], end_ns)
            device = self._devices[task.j]
            if span[0] >= span[1]:
                continue
            if task.kind == "recompute":
                recompute[device] += span[1] - span[0]
            elif task.kind not in COPY_KINDS:
                compute[device] += span[1] - span[0]
            own[device].append(span)
            running[task.device].append(span)
        found = []
        for device in range(count):
            computed = compute[device] + recompute[device]
            copied, occupied = int(covered(own[device])) - computed, int(covered(running[device]))
            found.append(Busy(compute[device], recompute[device], copied, occupied))
        return found


class Timeline(Sequence[TimelineEvent]):
    """Tasks as events in the order of starts, made when somebody asks for them.

    Args:
        tasks: the tasks.
        zero_ns: start of the events' clock.
        first: how many tasks come before those of the timeline.
    """

    def __init__(self, tasks: Tasks, zero_ns: int = 0, first: int = 0) -> None:
        self._tasks, self._zero_ns, self._first = tasks, zero_ns, first

    def __len__(self) -> int:
        return len(self._tasks) - self._first

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._events == [*other]

    def __hash__(self) -> int:
        return hash((len(self), self._zero_ns))

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def busy(self, length_us: float) -> list[Busy]:
        """The use of each device from the start of the events' clock on."""
        end_ns = self._zero_ns + round(length_us * 1000)
        return self._tasks.busy(self._first, len(self._tasks), self._zero_ns, end_ns)

    @cached_property
    def _events(self) -> list[TimelineEvent]:
        zero_us = self._zero_ns / 1e3
        tasks = self._tasks.between(self._first, len(self._tasks))
        return [
            TimelineEvent(
                f"cuda:{task.device}", task.stream, task.kind, task.i, task.j, task.issue_ns / 1e3 - zero_us,
                task.start_ns / 1e3 - zero_us, task.end_ns / 1e3 - zero_us, task.nbytes,
            )
            for task in sorted(tasks, key=lambda task: (task.start_ns, task.end_ns, task.j))
        ]  # fmt: skip
