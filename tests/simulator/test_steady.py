"""The short way of very large runs gives what the clock gives, event by event, or nothing."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.simulator.runs import steady
from gpipe_bench.simulator.runs.events import LARGE, Settings, run, run_whole
from gpipe_bench.simulator.runs.steady import foreseeable, run_large
from gpipe_bench.simulator.workloads.workload import Kernels, Workload
from tests.simulator.support import MS, Plain, task, workload
from tests.simulator.test_lives import heavy

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=150)
TIMES = st.integers(0, 30).map(lambda tens: 10 * tens)
KERNELS = st.builds(Kernels, TIMES, st.integers(0, 5))


@st.composite
def partitions(draw):
    """A partition at two sizes, with up to two tensors between."""
    tensors = (1,) * draw(st.integers(0, 2))
    return {
        size: task(draw(TIMES), draw(TIMES), draw(st.integers(0, 5)), input_bytes=tensors, output_bytes=tensors)
        for size in (1, 2)
    }


@st.composite
def workloads(draw, micro_batches):
    """Partitions of any speed; the last micro-batch may be smaller."""
    n = draw(st.integers(2, 6))
    sizes = (2,) * (draw(micro_batches) - 1) + (draw(st.sampled_from([1, 2])),)
    update = tuple(draw(KERNELS) for _ in range(n)) if draw(st.booleans()) else ()
    works = tuple(draw(partitions()) for _ in range(n))
    return Workload(works, sizes, loss=draw(KERNELS), optimizer=update)


MACHINES = st.builds(
    Plain,
    copy=st.sampled_from([0, 7, 100, 300]),
    launch_ns=st.sampled_from([0, 1, 10, 100]),
    queue_depth=st.sampled_from([0, 12, 100, 1000]),
)
SETTINGS = st.builds(
    Settings,
    components=st.builds(Components, early_recompute=st.booleans(), portals=st.booleans()),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    steps=st.integers(1, 3),
    memory=st.just(False),
)


def both(work, machine, chosen):
    """(by arrays, on the clock): makespan, ends of steps, all events; the first is None if there is no short way."""
    whole = run_whole(work, machine, chosen)
    exact = whole.makespan_ns, whole.step_ends_ns, sorted(whole.events(), key=str)
    short = run_large(work, machine, chosen, run_whole)
    if short is None:
        return None, exact
    events = [event for step in range(chosen.steps) for event in short.grid.events(step)]
    return (short.makespan_ns, short.step_ends_ns, sorted(events, key=str)), exact


@EXAMPLES
@given(work=workloads(st.integers(1, 12)), machine=MACHINES, chosen=SETTINGS)
def test_every_event_is_that_of_the_clock(work, machine, chosen):
    short, exact = both(work, machine, chosen)
    # With so few micro-batches none shares a copy stream.
    assert (short is None) == (not foreseeable(work, machine, chosen))
    assume(short is not None)
    assert short == exact


@settings(EXAMPLES, max_examples=25)
@given(work=workloads(st.integers(33, 80)), machine=MACHINES, chosen=SETTINGS)
def test_with_shared_copy_streams_too_or_there_is_no_result(work, machine, chosen):
    short, exact = both(work, machine, chosen)
    assume(short is not None)
    assert short == exact


def test_equal_partitions_have_a_short_way_however_many_microbatches():
    work, machine = workload(100, [task(1000, 2000, 3)] * 5), Plain(copy=100, launch_ns=20, queue_depth=1024)
    short, exact = both(work, machine, Settings(memory=False))
    assert short == exact


@pytest.mark.parametrize(("forward", "backward"), [(5000, 100), (100, 5000)])
@pytest.mark.parametrize("copy", [0, 100])
def test_copies_wait_for_those_that_used_their_stream_before(forward, backward, copy):
    # The hosts are far ahead of the device in the middle, where copies queue up until their streams are used again.
    work = workload(100, [task(100, 100), task(forward, backward), task(100, 100)])
    machine, chosen = Plain(copy=copy, launch_ns=1), Settings(checkpoint="never", memory=False)
    short, exact = both(work, machine, chosen)
    assert short == exact


def test_a_host_that_runs_ahead_of_another_has_none():
    # The slow first device holds its thread back by its launch queue; the second one's is soon 32 micro-batches ahead.
    tasks = [task(100, 9000, 5), task(1, 1, 1)]
    work, machine = workload(100, tasks), Plain(copy=1, launch_ns=1, queue_depth=20)
    assert both(work, machine, Settings(memory=False))[0] is None


@pytest.mark.parametrize("name", ["clock_cycle", "fork_join", "copy_streams"])
def test_whoever_can_choose_an_order_has_no_short_way(name):
    work, machine = workload(3, [task()] * 2), Plain()
    assert foreseeable(work, machine, Settings())
    assert not foreseeable(work, machine, Settings(Components(**{name: False})))


def test_skips_shared_devices_and_the_old_engine_have_none():
    work, machine = workload(3, [task()] * 2), Plain()
    assert not foreseeable(workload(3, [task()] * 2, [(0, 1)]), machine, Settings())
    for one in (Settings(devices=(0, 0)), Settings(flavour="published"), Settings(transfer="host")):
        assert not foreseeable(work, machine, one)


def test_a_large_run_takes_it():
    n = 64
    work, machine = workload(LARGE // n, [task(1000, 2000, 3)] * n), Plain(copy=100, launch_ns=20, queue_depth=1024)
    chosen = Settings(memory=False)
    found = run(work, machine, chosen)
    assert found.grid is not None
    assert found.extrapolated == ()
    assert len(found.grid.timeline(-1, 0)) == 2 * n * LARGE // n + n * (LARGE // n - 1) + 2 * (n - 1) * LARGE // n


@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_peaks_go_on_in_a_straight_line_where_they_are_not_known(checkpoint, monkeypatch):
    monkeypatch.setattr(steady, "VERY_LARGE", 1)
    work = workload(130, [heavy(forward=MS, backward=2 * MS, launches=20)] * 3)
    # Copies that take no time may end at any turn of their instant.
    machine, chosen = Plain(copy=0, launch_ns=8000, queue_depth=1024), Settings(checkpoint=checkpoint)
    short, whole = run_large(work, machine, chosen, run_whole), run_whole(work, machine, chosen)
    assert short.extrapolated == ("peak_live_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
    assert short.peak_live_bytes == whole.peak_live_bytes
    assert short.makespan_ns == whole.makespan_ns


def test_the_clock_runs_where_peaks_are_not_known_and_it_does_not_take_too_long():
    work, machine = workload(130, [heavy(launches=20)] * 3), Plain(copy=0, launch_ns=8000, queue_depth=1024)
    assert run_large(work, machine, Settings(), run_whole) is None
    assert run_large(work, machine, Settings(memory=False), run_whole) is not None


def test_the_timeline_is_in_the_order_of_starts():
    work, machine = workload(40, [task(1000, 2000, 3)] * 4), Plain(copy=100, launch_ns=20, queue_depth=1024)
    short, whole = (
        one(work, machine, Settings(memory=False)) for one in (partial(run_large, whole=run_whole), run_whole)
    )
    assert list(short.grid.timeline(-1, 0)) == whole.events()


def test_a_device_that_might_be_full_has_no_short_way():
    work = workload(130, [heavy(forward=MS, backward=2 * MS, launches=20)] * 3)
    machine, chosen = Plain(launch_ns=8000, queue_depth=1024, capacity_bytes=2**40), Settings()
    peak = max(run_large(work, machine, chosen, run_whole).peak_reserved_bytes)
    assert run_large(work, replace(machine, capacity_bytes=peak - 1), chosen, run_whole) is None


def test_the_use_of_devices_is_what_the_events_say():
    work = workload(6, [task(1000 + 100 * j, 2000 - 300 * j, 3) for j in range(4)])
    machine, chosen = Plain(copy=700, launch_ns=20, queue_depth=1024), Settings(Components(), "always", memory=False)
    short = run_large(work, machine, chosen, run_whole)
    window = 1500, short.makespan_ns - 2500
    found = short.grid.busy(0, window)
    for j, busy in enumerate(found):
        seen = {kind: set() for kind in ("compute", "recompute", "copy", "sent")}
        for event in short.grid.events(0):
            span = range(
                *(min(max(round(1000 * time), window[0]), window[1]) for time in (event.start_us, event.end_us))
            )
            kind = {"forward": "compute", "backward": "compute", "recompute": "recompute"}.get(event.kind, "copy")
            if event.partition == j:
                seen[kind].update(span)
            if kind == "copy" and event.device == f"cuda:{j}":
                seen["sent"].update(span)
        tasks = seen["compute"] | seen["recompute"]
        assert busy == (
            len(seen["compute"]),
            len(seen["recompute"]),
            len(seen["copy"] - tasks),
            len(tasks | seen["sent"]),
        )
