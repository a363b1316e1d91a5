"""The times of a run as arrays: events on demand, and the use of devices without them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple, overload

import numpy as np

from gpipe_bench.simulator.known_order.step_times import COMPUTATIONS, Integers, Step
from gpipe_bench.simulator.workloads.workload import Workload
from gpipe_bench.timeline import COPY_KINDS, TimelineEvent

__all__ = ["Busy", "Grid", "Timeline"]


_FORWARD: Final = ("forward", "copy", "portal")


class Busy(NamedTuple):
    """Nanoseconds of a device in a window of time.

    Attributes:
        compute: forward and backward passes.
        recompute: recomputations.
        copy: a copy into or out of its partition as :mod:`gpipe_bench.breakdown` counts them, and nothing else.
        occupied: a task, or a copy that it sends.
    """

    compute: int
    recompute: int
    copy: int
    occupied: int


class Grid:
    """All times of a run.

    Args:
        workload: what ran.
        devices: device of each partition, all different.
        steps: their times; those of portals are called ``portal KEY`` and ``portal_grad KEY``, by their skip.
    """

    def __init__(self, workload: Workload, devices: Sequence[int], steps: Sequence[Step]) -> None:
        self._work = workload
        self._devices = tuple(devices)
        self._steps = tuple(steps)
        self._skips = {skip.key: skip for skip in workload.skips}

    def ends_ns(self) -> tuple[int, ...]:
        """When the last task of each step had ended."""
        ends = [max(int(times.max()) for times in step.end.values()) for step in self._steps]
        return tuple(max(ends[: index + 1]) for index in range(len(ends)))

    def events(self, step: int, zero_ns: int = 0, device: str = "cuda") -> Iterator[TimelineEvent]:
        """The timeline of a step in the order of starts; (m n) of each kind, so there may be very many.

        Args:
            step: which; negative from the end.
            zero_ns: start of the events' clock.
            device: type of device in the names of devices.
        """
        times, m, n = self._steps[step], self._work.m, self._work.n
        kinds = list(times.end)
        there = [np.nonzero(ends >= 0) for ends in times.end.values()]
        cycles, partitions = (np.concatenate([axes[axis] for axes in there]) for axis in (0, 1))
        names = np.repeat(np.arange(len(kinds)), [len(axes[0]) for axes in there])
        issues, starts, ends = (
            np.concatenate([table[kind][where] for kind, where in zip(kinds, there, strict=True)])
            for table in (times.issue, times.start, times.end)
        )
        order = np.lexsort((issues, partitions, ends, starts))
        columns = (column[order].tolist() for column in (names, cycles, partitions, issues, starts, ends))
        for number, k, j, issue, start, end in zip(*columns, strict=True):
            kind, _, skip = kinds[number].partition(" ")
            i = k - j if kind in _FORWARD else m - 1 - k + n - 1 - j
            lane = "copy" if kind in COPY_KINDS else "compute"
            source = self._skips[skip].source if skip else j - 1
            place = self._devices[source if kind in {"copy", "portal"} else j]
            issue_us, start_us, end_us = ((time - zero_ns) / 1e3 for time in (issue, start, end))
            yield TimelineEvent(
                f"{device}:{place}", lane, kind, i, j, issue_us, start_us, end_us, self._bytes(kind, i, j, skip)
            )

    def timeline(self, step: int, zero_ns: int) -> Timeline:
        """The events of a step on a clock that starts at ``zero_ns``."""
        return Timeline(self, step, zero_ns)

    def count(self, step: int) -> int:
        """How many events a step has."""
        return sum(int((ends >= 0).sum()) for ends in self._steps[step].end.values())

    def busy(self, step: int, window: tuple[int, int]) -> list[Busy]:
        """The use of each partition's device between two instants in nanoseconds, by the tasks of one step."""
        times = self._steps[step]
        spans = {kind: _clipped(times, kind, window) for kind in times.end}
        rows = []
        for j in range(self._work.n):
            of = {kind: (starts[:, j], ends[:, j]) for kind, (starts, ends) in spans.items()}
            # Computations of one device never overlap.
            lengths = {kind: int((of[kind][1] - of[kind][0]).sum()) for kind in COMPUTATIONS}
            tasks = [of[kind] for kind in COMPUTATIONS]
            copies = [span for kind, span in of.items() if kind not in COMPUTATIONS]
            both = _union([*tasks, *copies])
            back = [span for kind, span in of.items() if kind.startswith(("copy_grad", "portal_grad"))]
            onwards = [tuple(edge[:, j + 1] for edge in spans["copy"])] if j + 1 < self._work.n else []
            for key, skip in self._skips.items():
                if skip.source == j and f"portal {key}" in spans:
                    onwards.append(tuple(edge[:, skip.target] for edge in spans[f"portal {key}"]))
            computed = sum(lengths.values())
            rows.append(
                Busy(
                    lengths["forward"] + lengths["backward"],
                    lengths["recompute"],
                    both - computed,
                    _union([*tasks, *onwards, *back]),
                )
            )
        return rows

    def _bytes(self, kind: str, i: int, j: int, skip: str) -> int:
        if skip:
            return self._skips[skip].bytes[self._work.microbatch_sizes[i]]
        work = self._work.task(i, j)
        if kind == "backward":
            return 0
        return sum(work.input_bytes if kind in COPY_KINDS else work.output_bytes)


class Timeline(Sequence[TimelineEvent]):
    """The events of a step in the order of starts, made when somebody asks for them.

    Args:
        grid: the run.
        step: which.
        zero_ns: start of the events' clock.
    """

    def __init__(self, grid: Grid, step: int, zero_ns: int) -> None:
        self._grid, self._step, self._zero_ns = grid, step, zero_ns

    def __len__(self) -> int:
        return self._grid.count(self._step)

    def __iter__(self) -> Iterator[TimelineEvent]:
        return self._grid.events(self._step, self._zero_ns)

    @overload
    def __getitem__(self, index: int) -> TimelineEvent: ...

    @overload
    def __getitem__(self, index: slice) -> list[TimelineEvent]: ...

    def __getitem__(self, index: int | slice) -> TimelineEvent | list[TimelineEvent]:
        return list(self)[index]


def _clipped(times: Step, kind: str, window: tuple[int, int]) -> tuple[Integers, Integers]:
    """Starts and ends within a window; where there is no task, nothing."""
    starts, ends = (np.clip(table[kind], *window) for table in (times.start, times.end))
    return starts, np.where(times.end[kind] >= 0, np.maximum(starts, ends), starts)


def _union(spans: Sequence[tuple[Integers, ...]]) -> int:
    """Length of the union of intervals."""
    starts, ends = (np.concatenate([span[edge] for span in spans]) for edge in (0, 1))
    order = np.argsort(starts, kind="stable")
    starts, reached = starts[order], np.maximum.accumulate(ends[order])
    before = np.concatenate([starts[:1], reached[:-1]])
    return int(np.maximum(reached - np.maximum(starts, before), 0).sum())
