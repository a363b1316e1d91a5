"""The tasks of a run, kept as columns; objects are made when somebody asks for them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol, overload

from gpipe_bench.simulator.clock.shared import KINDS

__all__ = ["Busy", "Task", "Tasks"]

_AT_ONCE: Final = 2**16
"""Tasks whose columns are fetched at once."""


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
    """Nanoseconds of a device in a window of time; in the order of BUSY in ``table.h``.

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

    def columns(self, first: int, last: int) -> Mapping[str, array[int]]:
        """The tasks from a number to before another, see RECORD in ``table.h``."""

    def busy(self, first: int, last: int, window: tuple[int, int]) -> list[Busy]:
        """The use of each device in a window of time by these tasks."""


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
            of = self._source.columns(first, min(first + _AT_ONCE, self._last))
            rows = zip(
                *(of[name] for name in ("kind", "i", "j", "device", "on_copy_stream")),
                *(of[name] for name in ("issue_ns", "start_ns", "end_ns", "bytes")),
                strict=True,
            )
            for kind, i, j, device, aside, issue, start, end, nbytes in rows:
                yield Task(KINDS[kind], i, j, device, "copy" if aside else "compute", issue, start, end, nbytes)

    @overload
    def __getitem__(self, index: int) -> Task: ...

    @overload
    def __getitem__(self, index: slice) -> Tasks: ...

    def __getitem__(self, index: int | slice) -> Task | Tasks:
        chosen = range(self._first, self._last)[index]
        if isinstance(chosen, int):
            return next(iter(Tasks(self._source, chosen, chosen + 1)))
        if chosen.step != 1:
            raise ValueError(f"a slice of tasks must have step 1, got {chosen.step}; make a list first")
        return Tasks(self._source, chosen.start, max(chosen.stop, chosen.start))

    def busy(self, start_ns: int, end_ns: int) -> list[Busy]:
        """The use of each device from one time to another by these tasks."""
        return self._source.busy(self._first, self._last, (start_ns, end_ns))
