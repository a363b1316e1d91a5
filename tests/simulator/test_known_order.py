"""Pipelines whose order of issue is known, with skips and hosts that run ahead, are what the clock makes of them."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpipe_bench.simulator.events import run_whole
from gpipe_bench.simulator.known_steps import is_known, run_known
from gpipe_bench.simulator.workload import SkipWork
from tests.simulator.support import SETTINGS
from tests.simulator.test_device_peaks import MACHINES, SIZES, workloads

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
