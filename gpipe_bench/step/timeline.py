"""The tasks of a replay as events, made when somebody asks for them, and the use of devices by them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from gpipe_bench.machine.replay import TaskTimes
from gpipe_bench.machine.trace import TracedTask
from gpipe_bench.results.breakdown import Busy, busy_times
from gpipe_bench.results.timeline import TimelineEvent


class Timeline(Sequence[TimelineEvent]):
    """Some tasks of a trace that ran, in the order of their starts.

    Args:
        tasks: of the trace.
        times: when they ran.
        places: of the timeline's in ``tasks``; those of which nothing ran are none of it.
        zero_ns: start of the events' clock.
    """

    def __init__(self, tasks: Sequence[TracedTask], times: TaskTimes, places: Sequence[int], zero_ns: int = 0) -> None:
        self._tasks, self._times, self._zero_ns = tasks, times, zero_ns
        turn = times.turn
        self._places = [place for place in places if turn[place] >= 0]

    def __len__(self) -> int:
        return len(self._places)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and self._events == [*other]

    def __hash__(self) -> int:
        return hash((len(self), self._zero_ns))

    def __getitem__(self, index: Any) -> Any:
        return self._events[index]

    def part(self, places: Sequence[int], zero_ns: int) -> Timeline:
        """Other tasks of the same trace, by their places, on another clock."""
        return Timeline(self._tasks, self._times, places, zero_ns)

    def busy(self, device_of: Sequence[int], length_ns: int) -> list[Busy]:
        """Nanoseconds of each device from the start of the events' clock on, by the device of each partition."""
        tasks, (_, start, end, _) = self._tasks, self._times
        spans = (
            ((task := tasks[place]).kind, device_of[task.j], task.device, start[place], end[place])
            for place in self._places
        )
        return busy_times(spans, max(device_of) + 1, self._zero_ns, self._zero_ns + length_ns)

    @cached_property
    def _events(self) -> list[TimelineEvent]:
        tasks, zero_ns, (issue, start, end, turn) = self._tasks, self._zero_ns, self._times

        def of(place: int) -> TimelineEvent:
            task = tasks[place]
            stream = "copy" if task.aside else "compute"
            issue_us, start_us, end_us = ((times[place] - zero_ns) / 1e3 for times in (issue, start, end))
            device = f"cuda:{task.device}"
            return TimelineEvent(device, stream, task.kind, task.i, task.j, issue_us, start_us, end_us, task.nbytes)

        return [
            *map(of, sorted(self._places, key=lambda place: (start[place], end[place], tasks[place].j, turn[place])))
        ]
