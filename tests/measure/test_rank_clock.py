"""Clocks of several processes: their offsets by ping-pong, and their events on one clock."""

from __future__ import annotations

import pytest

from gpipe_bench.measure import rank_clock
from gpipe_bench.measure.rank_clock import offset_to, one_record
from gpipe_bench.results.timeline import TimelineEvent


class Way:
    """Two clocks, one ``ahead`` of the other, and a way between them that takes some nanoseconds there and back."""

    def __init__(self, ahead, trips):
        self.time, self.ahead, self.trips = 1_000, ahead, iter(trips)

    def now(self):
        return self.time + self.ahead

    def ask(self):
        there, back = next(self.trips, (900, 900))
        self.time += there
        answer = self.time
        self.time += back
        return answer


@pytest.mark.parametrize("ahead", [0, 7_000_000, -7_000_000])
@pytest.mark.parametrize("fastest", [(20, 20), (40, 0), (0, 40)])
def test_the_fastest_exchange_bounds_the_error(ahead, fastest, monkeypatch):
    way = Way(ahead, [(500, 300), fastest, (30, 100)])
    monkeypatch.setattr(rank_clock, "perf_counter_ns", way.now)
    offset_ns, error_ns = offset_to(way.ask)
    assert error_ns == 20
    assert abs(offset_ns - ahead) <= error_ns
    assert (offset_ns == ahead) == (fastest == (20, 20))


def event(start_us, partition):
    return TimelineEvent("cpu", "compute", "forward", 0, partition, start_us, start_us, start_us + 1, 0)


def test_events_of_other_ranks_are_moved_to_the_zero_of_the_first():
    merged = one_record([(5_000, [event(1, 0), event(9, 0)]), (8_000, [event(2, 1)])])
    assert merged == [event(1, 0), event(5, 1), event(9, 0)]
