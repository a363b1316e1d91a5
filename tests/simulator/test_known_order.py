"""Pipelines whose order of issue is known, with skips and hosts that run ahead, are what the clock makes of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_bench.components import Components
from gpipe_bench.schedule import checkpoint_stop
from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.runs.events import LARGE, Settings, run, run_whole
from gpipe_bench.simulator.runs.known_steps import _by_states, is_known, run_known
from gpipe_bench.simulator.runs.simulation import device_uses, step_events
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.simulator.workloads.workload import Kernels, SkipWork
from tests.simulator.support import SETTINGS, Plain, task, workload
from tests.simulator.test_device_peaks import MACHINES, SIZES, workloads
from tests.simulator.test_live_copies import SHARING, WIDTH
from tests.simulator.test_lives import heavy

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=200)


@st.composite
def with_skips(draw, most, fewest=0):
    """Any workload of the tests of peaks, with skips between its partitions; some go to the next one."""
    work = draw(workloads(most))
    ends = st.integers(0, work.n - 2).flatmap(lambda a: st.tuples(st.just(a), st.integers(a + 1, work.n - 1)))
    ways = draw(st.lists(ends, min_size=fewest, max_size=4))
    skips = tuple(SkipWork(str(number), *way, {1: draw(SIZES), 2: draw(SIZES)}) for number, way in enumerate(ways))
    # Blocks of tasks are named without skips; the simulation makes those that a task does not name.
    bare = {"leaving": (), "returning": ()}
    touched = {end for way in ways for end in way}
    parts = tuple(
        {size: replace(one, **bare) if j in touched else one for size, one in works.items()}
        for j, works in enumerate(work.partitions)
    )
    return replace(work, partitions=parts, skips=skips)


def same(work, machine, chosen):
    """Check a run against the clock; whether there is one."""
    if not is_known(work, machine, chosen):
        return False
    short, whole = run_known(work, machine, chosen), run_whole(work, machine, chosen)
    if short is None:
        assert sum(whole.flushes)
        return False
    assert (short.makespan_ns, short.step_ends_ns) == (whole.makespan_ns, whole.step_ends_ns)
    events = [event for step in range(chosen.steps) for event in short.grid.events(step)]
    assert sorted(events, key=str) == sorted(whole.events(), key=str)
    for name in ("peak_live_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "flushes"):
        assert getattr(short, name) == getattr(whole, name)
    return True


@EXAMPLES
@given(work=with_skips(12), machine=MACHINES, chosen=SETTINGS)
def test_times_and_peaks_are_those_of_the_clock(work, machine, chosen):
    assume(same(work, machine, chosen))


@settings(EXAMPLES, max_examples=40)
@given(work=with_skips(80, fewest=1), machine=MACHINES, chosen=SETTINGS)
def test_with_shared_copy_streams_too(work, machine, chosen):
    assume(same(work, machine, chosen))


@st.composite
def unbalanced(draw):
    """Partitions some of which take so long that the threads of others run ahead, or come to wait for them."""
    work, slow = draw(with_skips(75)), draw(st.lists(st.sampled_from([1, 1, 30, 100]), min_size=5, max_size=5))
    parts = []
    for works, factor in zip(work.partitions, slow, strict=False):
        longer = {size: Kernels(factor * one.backward.duration_ns, 3) for size, one in works.items()}
        parts.append({size: replace(one, backward=longer[size]) for size, one in works.items()})
    return replace(work, partitions=tuple(parts))


@settings(EXAMPLES, max_examples=40)
@given(work=unbalanced(), machine=MACHINES, chosen=SETTINGS)
def test_with_host_threads_that_run_ahead(work, machine, chosen):
    assume(same(work, machine, chosen))


@pytest.mark.parametrize(("mode", "copied"), [("always", 20), ("except_last", 19), ("never", 0)])
def test_checkpoints_may_copy_what_tasks_without_do_not(mode, copied):
    layers, balance = SHARING["a concatenation"]
    whole = build_workload(
        nn.Sequential(*layers), balance=balance, batch_size=1000, chunks=20, profile=load_profile("p40"),
        sample=torch.ones(1, WIDTH),
    )  # fmt: skip
    work = whole.chosen(checkpoint_stop(mode, 20))

    tasks = [whole.task(i, 1) for i in range(20)]
    assert [work.task(i, 1) for i in range(20)] == [
        task.checkpointed if i < copied else replace(task, checkpointed=None) for i, task in enumerate(tasks)
    ]
    assert work.chosen(checkpoint_stop(mode, 20)) is work
    assert same(work, Plain(copy=500, launch_ns=20), Settings(checkpoint=mode, steps=2))
    found, expected = (run(one, Plain(copy=500), Settings(checkpoint=mode)) for one in (whole, work))
    assert found.makespan_ns == expected.makespan_ns
    assert found.peak_live_bytes == expected.peak_live_bytes


AHEAD = Plain(copy=1, launch_ns=1, queue_depth=20)
"""Its launch queue holds back the thread of a device that is slow, but not those of others."""


def slow_first(m):
    """The second device's thread is soon 32 micro-batches ahead of the first one's."""
    return workload(m, [heavy(forward=100, backward=9000, launches=5), *[heavy(forward=1, backward=1)] * 2])


@pytest.mark.parametrize("mode", ["always", "except_last", "never"])
@pytest.mark.parametrize("early", [True, False])
def test_a_host_thread_may_run_ahead_of_the_next_one(mode, early):
    work, chosen = slow_first(100), Settings(Components(early_recompute=early), mode, steps=2)
    assert same(work, AHEAD, chosen)


def test_its_memory_is_looked_up_too():
    work, chosen = slow_first(100), Settings()
    whole, short = run_whole(work, AHEAD, chosen), _by_states(work, AHEAD, chosen, (0, 1, 2))
    assert short.peak_reserved_bytes == whole.peak_reserved_bytes


@dataclass(frozen=True)
class OneBus(Plain):
    """All copies between devices take turns."""

    def bus(self, source: int, target: int) -> tuple[int, int] | None:
        return 0, 0


@pytest.mark.parametrize("skips", [[], [(0, 2), (0, 3)]])
def test_copies_take_turns_on_a_bus(skips):
    work = workload(40, [task(1000, 2000, 3)] * 4, skips)
    assert same(work, OneBus(copy=700, launch_ns=20), Settings(steps=2))


def test_a_large_run_with_skips_takes_this_way():
    work = workload(LARGE // 64, [task(1000, 2000, 3)] * 64, [(1, 40), (2, 30)])
    assert run(work, Plain(copy=100, launch_ns=20, queue_depth=1024), Settings(memory=False)).grid is not None


def test_the_timeline_is_in_the_order_of_starts():
    work, machine = workload(40, [task(1000, 2000, 3)] * 4), Plain(copy=100, launch_ns=20, queue_depth=1024)
    short, whole = (one(work, machine, Settings(memory=False)) for one in (run_known, run_whole))
    assert list(short.grid.timeline(-1, 0)) == whole.events()


def test_the_use_of_devices_with_skips_is_that_of_the_events():
    work = workload(20, [task(1000 + 100 * j, 2000 - 300 * j, 3) for j in range(4)], [(0, 2), (1, 3), (0, 3)])
    machine, chosen = Plain(copy=700, launch_ns=20, queue_depth=1024), Settings(steps=2)
    uses = []
    for one in (run_known, run_whole):
        done = one(work, machine, chosen)
        uses.append(device_uses(done, *step_events(done), range(4)))
    for found, expected in zip(*uses, strict=True):
        assert vars_of(found) == pytest.approx(vars_of(expected))


def vars_of(use):
    return {name: getattr(use, name) for name in use.__slots__}


@pytest.mark.parametrize(
    "chosen",
    [
        Settings(Components(clock_cycle=False)),
        Settings(Components(fork_join=False)),
        Settings(Components(copy_streams=False)),
        Settings(Components(portals=False)),
        Settings(devices=(0, 0, 1)),
        Settings(flavour="published"),
        Settings(backward="scheduled"),
        Settings(left_out=frozenset({"barrier"})),
    ],
)
def test_whoever_can_choose_an_order_or_takes_no_time_has_none(chosen):
    work, machine = workload(3, [task()] * 3, [(0, 2)]), Plain(launch_ns=1)
    assert is_known(work, machine, Settings())
    assert not is_known(work, machine, chosen)
    assert not is_known(work, Plain(), Settings())


def test_a_full_device_has_none():
    work = workload(20, [replace(heavy(forward=1000, backward=2000), leaving=())] * 3, [(0, 2)])
    machine = Plain(copy=100, launch_ns=20)
    peak = max(run_whole(work, machine, Settings()).peak_reserved_bytes)
    assert run_known(work, replace(machine, capacity_bytes=peak), Settings()) is not None
    assert run_known(work, replace(machine, capacity_bytes=peak - 1), Settings()) is None
