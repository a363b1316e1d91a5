"""Threads that race: latencies that vary, always in the same way, and the steps that it takes to see them."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from gpipe_bench.components import Components
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.steps.settings import enough_steps
from gpipe_bench.simulator.steps.trace import latencies
from tests.simulator.support import Plain, workload
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
