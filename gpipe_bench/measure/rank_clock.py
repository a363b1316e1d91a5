"""The clocks of several processes, which may be on several hosts: how far each is ahead of that of rank 0.

    rank r    asks at a ─────────────► hears at b        its own clock
    rank 0              answers with t                   the clock of rank 0

If the way there takes as long as the way back, rank 0 answered at (a + b) / 2 on the clock of rank r. At worst one of
the ways took no time: then the offset is wrong by half of the round trip. So of many exchanges the fastest one counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from time import perf_counter_ns
from typing import Final, NamedTuple

import torch
import torch.distributed as dist

from gpipe_bench.results.timeline import TimelineEvent

_EXCHANGES: Final = 50


class Offset(NamedTuple):
    """How far a clock is ahead of that of rank 0, and by how much this may be wrong, in nanoseconds."""

    offset_ns: float
    error_ns: float


def offset_to(ask: Callable[[], int]) -> Offset:
    """How far the clock of this process is ahead of another one.

    Args:
        ask: gives the time on the other clock, in nanoseconds.
    """
    trips = []
    for _ in range(_EXCHANGES):
        asked, answer, heard = perf_counter_ns(), ask(), perf_counter_ns()
        trips.append((heard - asked, (asked + heard) / 2 - answer))
    trip, offset = min(trips)
    return Offset(offset, trip / 2)


def offset_to_first(rank: int, size: int) -> Offset:
    """How far the clock of this rank is ahead of that of rank 0; all ranks of the default group must call this."""
    time = torch.zeros(1, dtype=torch.int64)
    if rank == 0:
        for other in range(1, size):
            for _ in range(_EXCHANGES):
                dist.recv(time, other)
                dist.send(time.fill_(perf_counter_ns()), other)
        return Offset(0.0, 0.0)

    def ask() -> int:
        dist.send(time, 0)
        dist.recv(time, 0)
        return int(time)

    return offset_to(ask)


def one_record(parts: Sequence[tuple[float, Iterable[TimelineEvent]]]) -> list[TimelineEvent]:
    """The events of all ranks on the clock of the first record.

    Args:
        parts: of each rank the zero of its record, on the clock of rank 0 in nanoseconds, and its events.
    """
    events = []
    for zero_ns, own in parts:
        later_us = (zero_ns - parts[0][0]) / 1e3
        for event in own:
            times = {name: getattr(event, name) + later_us for name in ("issue_us", "start_us", "end_us")}
            events.append(replace(event, **times))
    return sorted(events, key=lambda event: (event.start_us, event.end_us, event.partition))
