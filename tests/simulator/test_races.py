"""Threads that race: latencies that vary, always in the same way, and the steps that it takes to see them."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from gpipe_bench.components import Components
from gpipe_bench.simulator.clock.latency import latencies
from gpipe_bench.simulator.clock.run import Settings, run
from gpipe_bench.simulator.clock.settings import enough_steps
from tests.simulator.support import Plain, task, workload
from tests.simulator.test_lives import heavy

HOST = Plain(launch_ns=10_000, queue_depth=1024)
BASELINE = Components.from_label("baseline")


def some(count, mean_ns, seed):
    return list(islice(latencies(mean_ns, seed), count))


def test_latencies_are_the_same_each_time_and_their_mean_is_what_it_should_be():
    drawn = some(4000, 100_000, 3)
    assert drawn == some(4000, 100_000, 3) != some(4000, 100_000, 4)
    assert sum(drawn) / len(drawn) == pytest.approx(100_000, rel=0.05)
    # Of an exponential distribution: few are long.
    assert sum(one > 230_000 for one in drawn) / len(drawn) == pytest.approx(0.1, abs=0.02)
    assert all(one % 1000 == 0 for one in drawn)


def baseline(components=BASELINE, **changes):
    work = workload(4, [heavy(launches=20)] * 3)
    return run(work, HOST, Settings(components, "always", "published", **changes))


def test_a_run_repeats_itself_and_another_seed_gives_another():
    ends = [baseline(steps=6, seed=seed).step_ends_ns for seed in (0, 0, 1)]
    assert ends[0] == ends[1] != ends[2]


def test_steps_differ_where_threads_race_and_only_there():
    def lengths(components):
        ends = baseline(components, steps=8).step_ends_ns
        return {after - before for before, after in pairwise(ends[1:])}

    assert len(lengths(BASELINE)) > 1
    assert len(lengths(Components())) == 1


def test_more_steps_where_threads_race():
    racing = Settings(BASELINE, "except_last", "published")
    assert racing.races
    assert enough_steps(racing, 32) == 33
    assert enough_steps(racing, 10_000) == 2
    for calm in (
        Settings(BASELINE, "except_last", "current"),
        Settings(BASELINE, "never", "published"),
        Settings(Components.from_label("dep-x-x"), "except_last", "published"),
    ):
        assert enough_steps(calm, 32) == 2


def test_the_time_of_a_step_is_the_mean_after_the_first():
    found = baseline(steps=5)
    assert found.step_ns == round((found.step_ends_ns[-1] - found.step_ends_ns[0]) / 4)
    assert baseline(steps=1).step_ns == baseline(steps=1).makespan_ns


def orders(left_out, **switches):
    work = workload(4, [task(launches=20)] * 2)
    return [
        (one.kind, one.i, one.j)
        for one in run(work, HOST, Settings(Components(**switches), "always", left_out=frozenset(left_out))).issued
        if one.kind in {"recompute", "backward"} and one.j == 1
    ]


def test_without_ranks_nodes_run_as_they_come():
    """By rank the last device recomputes from the last micro-batch on; by arrival from the first."""
    assert [i for kind, i, _ in orders((), fork_join=False) if kind == "recompute"] == [3, 2, 1, 0]
    assert [i for kind, i, _ in orders({"rank"}, fork_join=False) if kind == "recompute"] == [0, 1, 2, 3]


def test_without_a_barrier_a_copy_waits_for_its_sender_alone():
    def makespan(*left_out):
        work = workload(4, [task()] * 3)
        chosen = Settings(Components(copy_streams=False), "never", left_out=frozenset(left_out), memory=False)
        return run(work, Plain(copy=3_000_000), chosen).makespan_ns

    assert makespan("barrier") < makespan()
