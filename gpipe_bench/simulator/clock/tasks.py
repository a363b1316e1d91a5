"""The tasks of a run, kept in C; objects are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import Any, Final, NamedTuple, Protocol

from gpipe_bench.simulator.clock.shared import KINDS
from gpipe_bench.timeline import TimelineEvent

TASK_ROW: Final = Struct("4q3i2b0q")
"""``TaskRow`` of ``clock.h``."""

_AT_ONCE: Final = 2**16
"""Tasks that are fetched at once."""


@dataclass(frozen=True, slots=True)
class Task:
    """A task as a host thread issued it.

    Attributes:
        kind: one of :data:`gpipe_bench.timeline.KINDS`.
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
    """Nanoseconds of a device in a window of time; ``Busy`` of ``clock.h``.

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


class Source(Protocol):
    """Where tasks are."""

    def rows(self, first: int, last: int) -> Iterator[tuple[Any, ...]]:
        """The tasks from a number to before another, as :data:`TASK_ROW` has them."""

    def busy(self, first: int, last: int, start_ns: int, end_ns: int) -> list[Busy]:
        """The use of each device by these tasks from one time to another."""


class Tasks(Sequence[Task]):
    """Tasks in the order in which host threads issued them, made when somebody asks for them.

    Args:
        source: where they are.
        first: number of the first one.
        last: number after the last one.
    """

    def __init__(self, source: Source, first: int, last: int) -> None:
        self._source, self._first, self._last = source, first, last

    def __len__(self) -> int:
        return self._last - self._first

    def __iter__(self) -> Iterator[Task]:
        for first in range(self._first, self._last, _AT_ONCE):
            for row in self._source.rows(first, min(first + _AT_ONCE, self._last)):
                issue, start, end, nbytes, i, j, device, kind, aside = row
                yield Task(KINDS[kind], i, j, device, "copy" if aside else "compute", issue, start, end, nbytes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [*self][index]
        number = range(self._first, self._last)[index]
        return next(iter(Tasks(self._source, number, number + 1)))

    def last(self, count: int) -> Tasks:
        """The last tasks, so many."""
        return Tasks(self._source, self._last - count, self._last)

    def busy(self, start_ns: int, end_ns: int) -> list[Busy]:
        """The use of each device from one time to another by these tasks."""
        return self._source.busy(self._first, self._last, start_ns, end_ns)


class Timeline(Sequence[TimelineEvent]):
    """Tasks as events in the order of starts, made when somebody asks for them.

    Args:
        tasks: the tasks.
        zero_ns: start of the events' clock.
    """

    def __init__(self, tasks: Tasks, zero_ns: int = 0) -> None:
        self._tasks, self._zero_ns = tasks, zero_ns

    def __len__(self) -> int:
        return len(self._tasks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._events == [*other]

    def __hash__(self) -> int:
        return hash((len(self), self._zero_ns))

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def busy(self, length_ns: int) -> list[Busy]:
        """The use of each device from the start of the events' clock on."""
        return self._tasks.busy(self._zero_ns, self._zero_ns + length_ns)

    @cached_property
    def _events(self) -> list[TimelineEvent]:
        zero_us = self._zero_ns / 1e3
        return [
            TimelineEvent(
                f"cuda:{task.device}", task.stream, task.kind, task.i, task.j, task.issue_ns / 1e3 - zero_us,
                task.start_ns / 1e3 - zero_us, task.end_ns / 1e3 - zero_us, task.nbytes,
            )
            for task in sorted(self._tasks, key=lambda task: (task.start_ns, task.end_ns, task.j))
        ]  # fmt: skip
