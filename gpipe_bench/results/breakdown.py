"""Where the time of each device goes: compute, recompute, copy, imbalance, bubble.

For one device, or partition, and one step of length T, every instant counts once, by the first rule that holds:

    compute    a forward or backward runs
    recompute  a recomputation runs
    copy       a copy of its own runs and nothing else does
    the rest is idle. Of it
    imbalance  is what the busiest one works more than this one: idle even in a pipeline without a bubble
    bubble     is the remainder: fill, drain and waiting

The five shares of a device add up to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from gpipe_bench.results.timeline import COPY_KINDS, TimelineEvent

Interval = tuple[float, float]

RanTask = tuple[str, int, int, float, float]
"""A task that ran: its kind, the device of its partition, the device that ran it, when it started and had ended."""


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Shares of one device's time, or partition's, in a step, each in [0, 1], together 1."""

    compute_fraction: float
    recompute_fraction: float
    copy_fraction: float
    imbalance_fraction: float
    bubble_fraction: float

    @property
    def utilization_fraction(self) -> float:
        """The share in which a computation ran."""
        return self.compute_fraction + self.recompute_fraction


class Busy(NamedTuple):
    """How long a device is busy in a window of time.

    Attributes:
        compute: forward and backward passes.
        recompute: recomputations, and no such pass.
        copy: a copy of its partitions and nothing else.
        occupied: a task, or a copy that it sends.
    """

    compute: float
    recompute: float
    copy: float
    occupied: float


def busy_times(tasks: Iterable[RanTask], devices: int, start: float, end: float) -> list[Busy]:
    """How long each device is busy between two instants.

    Args:
        tasks: what of them lies outside counts nothing.
        devices: how many there are.
        start: the first instant.
        end: the second, in the unit of the tasks, which is that of the result.
    """
    lists: list[list[list[Interval]]] = [[[] for _ in range(devices)] for _ in range(4)]
    passes, computing, all_own, running = lists
    for kind, home, device, begin, stop in tasks:
        span = max(begin, start), min(stop, end)
        if span[0] < span[1]:
            all_own[home].append(span)
            running[device].append(span)
            if kind not in COPY_KINDS:
                computing[home].append(span)
                if kind != "recompute":
                    passes[home].append(span)
    found = []
    for own in zip(*lists, strict=True):
        compute, computed, busy, occupied = map(covered, own)
        found.append(Busy(compute, computed - compute, busy - computed, occupied))
    return found


def split_device_time(
    events: Iterable[TimelineEvent], device_of: Sequence[int] | Mapping[int, int], start_us: float, end_us: float
) -> list[Breakdown]:
    """The breakdown of each device between two instants.

    Args:
        events: the events of one step; parts outside the window are cut off.
        device_of: device of each partition, from 0 on; ``range(n)`` gives the breakdown of each of n partitions.
        start_us: start of the window, in microseconds on the events' clock.
        end_us: its end, later than ``start_us``.

    Raises:
        ValueError: the window is empty.
    """
    total = end_us - start_us
    if total <= 0:
        raise ValueError(f"end_us must be later than start_us, got {start_us} to {end_us}; pass the whole step")
    tasks = ((event.kind, (home := device_of[event.partition]), home, event.start_us, event.end_us) for event in events)
    devices = 1 + max(device_of.values() if isinstance(device_of, Mapping) else device_of)
    return split_busy_time(busy_times(tasks, devices, start_us, end_us), total)


def split_busy_time(busy: Sequence[Busy], total: float) -> list[Breakdown]:
    """The breakdown of each device from how long it was busy; ``total``: length of the step, in the same unit."""
    longest = max((compute + recompute for compute, recompute, *_ in busy), default=0.0)
    rows = []
    for compute, recompute, copy, _ in busy:
        idle = max(total - compute - recompute - copy, 0.0)  # the sum of many intervals may round to a little more
        imbalance = min(idle, longest - compute - recompute)
        rows.append(
            Breakdown(compute / total, recompute / total, copy / total, imbalance / total, (idle - imbalance) / total)
        )
    return rows


def mean_breakdown(rows: Sequence[Breakdown]) -> Breakdown:
    """The mean over devices, each share on its own."""
    names = Breakdown.__slots__
    return Breakdown(*(sum(getattr(row, name) for row in rows) / len(rows) for name in names))


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    length, reached = 0.0, -inf
    for start, end in sorted(intervals):
        if end > reached:
            length += end - max(start, reached)
            reached = end
    return length
