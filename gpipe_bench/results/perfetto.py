"""Slices as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Perfetto leaves out a slice that overlaps another one of its track in part. So a track is drawn as several ones where
its slices overlap:

    copy         ██████   ████
    copy (2)         ████
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Slice:
    """A span of time on a track.

    Attributes:
        process: number of the group that the track belongs to.
        track: name of the track.
        name: shown on the slice.
        category: what kind of slice it is.
        start_us: when it starts.
        end_us: when it ends.
        facts: shown when the slice is chosen.
    """

    process: int
    track: str
    name: str
    category: str
    start_us: float
    end_us: float
    facts: Mapping[str, Any]


def perfetto_trace(
    slices: Iterable[Slice], *, processes: Mapping[int, str], tracks: Sequence[str], facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The trace, as JSON has it.

    Args:
        slices: in any order.
        processes: name of each group of tracks by its number.
        tracks: names of all tracks, in the order in which they are shown.
        facts: title and plain facts that are shown with the trace.
    """
    placed = list(_in_lanes(slices))
    lanes = sorted({(each.process, tracks.index(each.track), lane) for each, lane in placed})
    rows = [_name("process", name, process) for process, name in processes.items()]
    threads: dict[tuple[int, str, int], int] = {}
    for process, track, lane in lanes:
        thread = threads[process, tracks[track], lane] = sum(own == process for own, _, _ in threads)
        rows.append(_name("thread", tracks[track] + (f" ({lane + 1})" if lane else ""), process, thread))
    rows += [_row(each, threads[each.process, each.track, lane]) for each, lane in placed]
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": dict(facts)}


def _in_lanes(slices: Iterable[Slice]) -> Iterator[tuple[Slice, int]]:
    """Slices in the order of starts, each with the first lane of its track that is free."""
    ends: dict[tuple[int, str], list[int]] = {}
    for each in sorted(slices, key=lambda each: (each.start_us, each.end_us, each.process, each.category)):
        start, end = _span_ns(each)
        own = ends.setdefault((each.process, each.track), [])
        lane = next((lane for lane, busy in enumerate(own) if busy <= start), len(own))
        own[lane : lane + 1] = [end]
        yield each, lane


def _span_ns(each: Slice) -> tuple[int, int]:
    """Start and end in whole nanoseconds, of which Perfetto's clock is made."""
    start = round(each.start_us * 1000)
    return start, round(each.end_us * 1000)


def _us(ns: int) -> float:
    """Microseconds of whole nanoseconds: Perfetto multiplies by 1000, and cuts off what is behind the point."""
    us = ns / 1000
    return us if int(us * 1000) == ns else math.nextafter(us, math.copysign(math.inf, us))


def _name(what: str, name: str, process: int, thread: int = 0) -> dict[str, Any]:
    return {"ph": "M", "name": f"{what}_name", "pid": process, "tid": thread, "args": {"name": name}}


def _row(each: Slice, thread: int) -> dict[str, Any]:
    start, end = _span_ns(each)
    return {
        "ph": "X",
        "name": each.name,
        "cat": each.category,
        "pid": each.process,
        "tid": thread,
        "ts": _us(start),
        "dur": _us(end - start),
        "args": dict(each.facts),
    }
