"""The tasks of a run; objects are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from gpipe_bench.machine.replay import TaskTimes
from gpipe_bench.machine.trace import TracedTask
from gpipe_bench.results.timeline import COPY_KINDS, TimelineEvent

Numbers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


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


class Busy(NamedTuple):
    """Nanoseconds of a device in a window of time.

    Attributes:
        compute_ns: forward and backward passes.
        recompute_ns: recomputations.
        copy_ns: a copy of its partitions and nothing else.
        occupied_ns: a task, or a copy that it sends.
    """

    compute_ns: int
    recompute_ns: int
    copy_ns: int
    occupied_ns: int


class Tasks(Sequence[TimedTask]):
    """Tasks in the order in which host threads issued them, made when somebody asks for them.

    Args:
        tasks: of a trace, step by step.
        times: when they ran.
        devices: of each partition.
    """

    def __init__(self, tasks: Sequence[TracedTask], times: TaskTimes, devices: Sequence[int]) -> None:
        self._devices = devices
        issue, start, end, turn = (np.frombuffer(column, np.int64) for column in times)
        order = np.argsort(turn, kind="stable")[np.count_nonzero(turn < 0) :]
        self._tasks = [tasks[place] for place in order.tolist()]
        self._times = np.stack([issue, start, end])[:, order]

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[TimedTask]:
        return self.between(0, len(self))

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]

    def between(self, first: int, last: int) -> Iterator[TimedTask]:
        """Those from ``first`` to before ``last``."""
        times = self._times[:, first:last].T.tolist()
        for task, (issue, start, end) in zip(self._tasks[first:last], times, strict=True):
            stream = "copy" if task.aside else "compute"
            yield TimedTask(task.kind, task.i, task.j, task.device, stream, issue, start, end, task.nbytes)

    def step_ends(self, steps: int) -> tuple[int, ...]:
        """When the last task of each step, and of those before, had ended; all steps have as many tasks."""
        ends = np.maximum.accumulate(self._times[2])
        return tuple(int(ends[len(self) * step // steps - 1]) for step in range(1, steps + 1))

    def busy(self, first: int, last: int, start_ns: int, end_ns: int) -> list[Busy]:
        """The use of each device by some of them from one time to another. Computations of one device never overlap."""
        tasks, count = self._tasks[first:last], max(self._devices) + 1
        start, end = (self._times[row, first:last].clip(start_ns, end_ns) for row in (1, 2))
        own = np.array([self._devices[task.j] for task in tasks], np.int64)
        running = np.array([task.device for task in tasks], np.int64)
        computes = np.array([0 if task.kind in COPY_KINDS else 1 + (task.kind == "recompute") for task in tasks])
        spent = np.zeros((3, count), np.int64)
        np.add.at(spent, (computes, own), end - start)
        every, occupied = (_covered(device, start, end, count) for device in (own, running))
        return [
            Busy(int(compute), int(recompute), int(each - compute - recompute), int(used))
            for compute, recompute, each, used in zip(spent[1], spent[2], every, occupied, strict=True)
        ]


def _covered(device: Numbers, start: Numbers, end: Numbers, count: int) -> list[int]:
    """The length of the union of some spans of each device."""
    order = np.lexsort((start, device))
    starts, ends = start[order], end[order]
    bounds = np.searchsorted(device[order], np.arange(count + 1))
    lengths = []
    for first, last in pairwise(bounds.tolist()):
        reached = np.maximum.accumulate(np.concatenate(([np.iinfo(np.int64).min], ends[first:last])))[:-1]
        lengths.append(int((ends[first:last] - np.maximum(starts[first:last], reached)).clip(0).sum()))
    return lengths


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
