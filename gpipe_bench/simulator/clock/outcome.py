"""The result of a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

from gpipe_bench.simulator.clock.shared import Result
from gpipe_bench.simulator.clock.tasks import Busy, Tasks
from gpipe_bench.timeline import TimelineEvent

__all__ = ["Run", "Timeline"]


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation gives.

    Attributes:
        result: numbers of the clock, see RESULT in ``table.h``.
        step_ends_ns: when the last operation of each step ended.
        issued: every task, in the order in which host threads issued it.
        peak_live_bytes: per device, of all tensors; empty without memory.
        peak_allocated_bytes: the same, rounded as the allocator rounds.
        peak_reserved_bytes: of segments.
        flushes: per device, how often its allocator gave cached segments back.
        devices: of each partition.
    """

    result: Result
    step_ends_ns: tuple[int, ...]
    issued: Tasks
    peak_live_bytes: tuple[int, ...]
    peak_allocated_bytes: tuple[int, ...]
    peak_reserved_bytes: tuple[int, ...]
    flushes: tuple[int, ...]
    devices: tuple[int, ...]

    @property
    def makespan_ns(self) -> int:
        """When the last operation ended."""
        return int(self.result.makespan_ns)

    @property
    def step_ns(self) -> int:
        """The mean time of the steps after the first; of a single one until its devices are idle."""
        ends = self.step_ends_ns
        return round((ends[-1] - ends[0]) / (len(ends) - 1)) if len(ends) > 1 else self.makespan_ns

    def events(self, device: str = "cuda") -> Timeline:
        """The timeline, in the order of starts.

        Args:
            device: type of device in the names of devices.
        """
        return Timeline(self.issued, 0, device)


class Timeline(Sequence[TimelineEvent]):
    """Tasks as events in the order of starts, made when somebody asks for them.

    Args:
        tasks: the tasks.
        zero_ns: start of the events' clock.
        device: type of device in the names of devices.
    """

    def __init__(self, tasks: Tasks, zero_ns: int = 0, device: str = "cuda") -> None:
        self._tasks, self._zero_ns, self._device = tasks, zero_ns, device

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[TimelineEvent]:
        return iter(self._events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._events == [*other]

    def __hash__(self) -> int:
        return hash((len(self), self._zero_ns))

    @overload
    def __getitem__(self, index: int) -> TimelineEvent: ...

    @overload
    def __getitem__(self, index: slice) -> list[TimelineEvent]: ...

    def __getitem__(self, index: int | slice) -> TimelineEvent | list[TimelineEvent]:
        return self._events[index]

    def busy(self, length_ns: int) -> list[Busy]:
        """The use of each device from the start of the events' clock on."""
        return self._tasks.busy(self._zero_ns, self._zero_ns + length_ns)

    @cached_property
    def _events(self) -> list[TimelineEvent]:
        zero_us = self._zero_ns / 1e3
        return [
            TimelineEvent(
                f"{self._device}:{task.device}", task.stream, task.kind, task.i, task.j, task.issue_ns / 1e3 - zero_us,
                task.start_ns / 1e3 - zero_us, task.end_ns / 1e3 - zero_us, task.nbytes,
            )
            for task in sorted(self._tasks, key=lambda task: (task.start_ns, task.end_ns, task.j))
        ]  # fmt: skip
