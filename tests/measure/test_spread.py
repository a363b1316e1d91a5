"""Repeats within a budget, on a clock that only the operation moves."""

import pytest

from gpipe_bench.measure.spread import repeated, spread


class Work:
    """An operation of a fixed cost, of which a share passes while it is queued and the rest while it is waited for."""

    def __init__(self, cost_s, *, while_queued=0.0):
        self.cost_s = cost_s
        self.while_queued = while_queued
        self.now_s = 0.0
        self.pending_s = 0.0
        self.calls = 0
        self.waits = 0

    def run(self):
        self.calls += 1
        self.now_s += self.cost_s * self.while_queued
        self.pending_s += self.cost_s * (1 - self.while_queued)

    def synchronize(self):
        self.waits += 1
        self.now_s += self.pending_s
        self.pending_s = 0.0

    def measure(self, budget_s, **options):
        return repeated(self.run, self.synchronize, budget_s, clock=lambda: self.now_s, **options)


def test_spread_of_samples():
    assert spread([3.0, 1.0, 2.0, 10.0]) == {"min": 1.0, "median": 2.5, "max": 10.0}


def test_the_time_of_one_call_is_found_whether_it_is_queued_or_not():
    for share in (0.0, 0.5, 1.0):
        assert Work(0.25, while_queued=share).measure(100.0) == pytest.approx([0.25] * 20)


def test_three_repeats_at_least_whatever_the_budget():
    work = Work(1.0)
    assert len(work.measure(0.001)) == 3
    assert work.calls == 2 + 3


def test_twenty_repeats_at_most():
    assert len(Work(0.001).measure(1e6)) == 20


def test_no_repeat_starts_after_the_budget_is_spent():
    # two calls to warm up and five repeats fill 7 s
    assert len(Work(1.0).measure(6.5)) == 5


@pytest.mark.parametrize(("cost_s", "calls"), [(1e-3, 5), (2.5e-3, 2), (1.0, 1), (1e-9, 1000)])
def test_a_repeat_makes_as_many_calls_as_fill_five_milliseconds(cost_s, calls):
    work = Work(cost_s)
    work.measure(0.0)
    assert work.calls == 2 + 3 * calls


def test_host_only_reads_the_clock_before_the_operation_has_run():
    work = Work(1.0, while_queued=0.25)
    assert work.measure(0.0, host_only=True) == pytest.approx([0.25] * 3)
    assert work.calls == 2 + 3
    assert work.pending_s == 0.0
