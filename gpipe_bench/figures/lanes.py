"""Lanes of a timeline: one per partition and stream, and within a lane boxes that overlap share its height.

    time ->
compute  [ F0 ][ F1 ][ F2 ]     alone: full height
         [ B2      ]            at the same time: half the height each
              [ B1      ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpipe_bench.results.timeline import TimelineEvent

# Clocks of host and device differ by less than this share of a step; a smaller overlap is drawn as a touch.
_TOUCH_FRACTION = 0.001


@dataclass(frozen=True, slots=True)
class Box:
    """An event with its place across the lane: ``track`` of ``tracks``, 0 at the top."""

    event: TimelineEvent
    track: int
    tracks: int


def lane_keys(events: Sequence[TimelineEvent]) -> list[tuple[int, str]]:
    """``(partition, stream)`` of every lane, partitions ascending, compute before copy.

    A partition has a compute lane even when nothing ran there.
    """
    present = {(event.partition, event.stream) for event in events}
    partitions = range(max((partition for partition, _ in present), default=-1) + 1)
    return [
        (j, stream)
        for j in partitions
        for stream in ("compute", "copy")
        if stream == "compute" or (j, stream) in present
    ]


def stack(events: Sequence[TimelineEvent], span_us: float) -> list[Box]:
    """Place the events of one lane.

    Args:
        events: in any order.
        span_us: length of the step, in microseconds.
    """
    ordered = sorted(events, key=lambda e: (e.start_us, -e.end_us, e.kind, e.microbatch))
    boxes: list[Box] = []
    cluster: list[tuple[TimelineEvent, int]] = []
    ends: list[float] = []
    for event in ordered:
        start = event.start_us + _TOUCH_FRACTION * span_us
        if cluster and start >= max(ends):
            boxes += _close(cluster, len(ends))
            cluster, ends = [], []
        track = next((k for k, end in enumerate(ends) if start >= end), len(ends))
        ends[track : track + 1] = [event.end_us]
        cluster.append((event, track))
    return boxes + _close(cluster, len(ends))


def _close(cluster: Sequence[tuple[TimelineEvent, int]], tracks: int) -> list[Box]:
    return [Box(event, track, tracks) for event, track in cluster]
