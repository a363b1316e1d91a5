"""Where the time of each device goes: compute, recompute, copy, imbalance, bubble.

For one partition and one step of length T, every instant counts once, by the first rule that holds:

    compute    a forward or backward runs
    recompute  a recomputation runs
    copy       a copy of this partition runs and nothing else does
    the rest is idle. Of it
    imbalance  is what the busiest partition works more than this one: idle even in a pipeline without a bubble
    bubble     is the remainder: fill, drain and waiting

The five shares of a partition add up to 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpipe_bench.results.timeline import COMPUTE_KINDS, COPY_KINDS, TimelineEvent

Interval = tuple[float, float]

_COMPUTE = tuple(kind for kind in COMPUTE_KINDS if kind != "recompute")


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Shares of one partition's time in a step, each in [0, 1], together 1."""

    compute_fraction: float
    recompute_fraction: float
    copy_fraction: float
    imbalance_fraction: float
    bubble_fraction: float

    @property
    def utilization_fraction(self) -> float:
        """The share in which a computation ran."""
        return self.compute_fraction + self.recompute_fraction


def split_device_time(events: Iterable[TimelineEvent], n: int, start_us: float, end_us: float) -> list[Breakdown]:
    """The breakdown of each partition between two instants.

    Args:
        events: the events of one step; parts outside the window are cut off.
        n: partitions.
        start_us: start of the window, in microseconds on the events' clock.
        end_us: its end, later than ``start_us``.

    Raises:
        ValueError: the window is empty.
    """
    total = end_us - start_us
    if total <= 0:
        raise ValueError(f"end_us must be later than start_us, got {start_us} to {end_us}; pass the whole step")
    clipped = [
        (event, (max(event.start_us, start_us), min(event.end_us, end_us)))
        for event in events
        if event.end_us > start_us and event.start_us < end_us
    ]
    members: list[list[tuple[TimelineEvent, Interval]]] = [[] for _ in range(n)]
    for pair in clipped:
        members[pair[0].partition].append(pair)
    return split_busy_time([_busy(pairs) for pairs in members], total)


def split_busy_time(busy: Sequence[tuple[float, float, float]], total: float) -> list[Breakdown]:
    """The breakdown of each partition from how long it was busy.

    Args:
        busy: of each partition, the time of computations, that of recomputations, and that of copies alone.
        total: length of the step, in the same unit.
    """
    longest = max((compute + recompute for compute, recompute, _ in busy), default=0.0)
    rows = []
    for compute, recompute, copy in busy:
        idle = max(total - compute - recompute - copy, 0.0)  # the sum of many intervals may round to a little more
        imbalance = min(idle, longest - compute - recompute)
        rows.append(
            Breakdown(compute / total, recompute / total, copy / total, imbalance / total, (idle - imbalance) / total)
        )
    return rows


def mean_breakdown(rows: Sequence[Breakdown]) -> Breakdown:
    """The mean over partitions, each share on its own."""
    names = Breakdown.__slots__
    return Breakdown(*(sum(getattr(row, name) for row in rows) / len(rows) for name in names))


def covered(intervals: Iterable[Interval]) -> float:
    """Length of the union of intervals."""
    return _length(_union(intervals))


def _busy(pairs: Sequence[tuple[TimelineEvent, Interval]]) -> tuple[float, float, float]:
    compute = _union(interval for event, interval in pairs if event.kind in _COMPUTE)
    recompute = _union(interval for event, interval in pairs if event.kind == "recompute")
    copy = _union(interval for event, interval in pairs if event.kind in COPY_KINDS)
    with_recompute = _union([*compute, *recompute])
    everything = _union([*with_recompute, *copy])
    return (
        _length(compute),
        _length(with_recompute) - _length(compute),
        _length(everything) - _length(with_recompute),
    )


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)
