"""The tasks of a run, kept in C; objects are made when somebody asks for them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from gpipe_bench.results.timeline import TimelineEvent
from gpipe_bench.simulator.clock.shared import KINDS

if TYPE_CHECKING:
    from gpipe_bench.simulator.clock.run import Clock

TASK_ROW: Final = Struct("4q3i2b0q")
"""``TaskRow`` of ``clock.h``."""


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


class Tasks(Sequence[TimedTask]):
    """Tasks in the order in which host threads issued them, made when somebody asks for them.

    Args:
        clock: has them.
        first: number of the first one.
        last: number after the last one.
    """

    def __init__(self, clock: Clock, first: int, last: int) -> None:
        self.clock, self.first, self.last = clock, first, last

    def __len__(self) -> int:
        return self.last - self.first

    def __iter__(self) -> Iterator[TimedTask]:
        for row in self.clock.rows(self.first, self.last):
            issue, start, end, nbytes, i, j, device, kind, aside = row
            yield TimedTask(KINDS[kind], i, j, device, "copy" if aside else "compute", issue, start, end, nbytes)

    def __getitem__(self, index: Any) -> Any:
        return [*self][index]


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

    def busy(self, length_us: float) -> list[Busy]:
        """The use of each device from the start of the events' clock on."""
        end_ns = self._zero_ns + round(length_us * 1000)
        return self._tasks.clock.busy(self._tasks.first, self._tasks.last, self._zero_ns, end_ns)

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
