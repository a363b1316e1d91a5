"""Exact makespans: a forward pass or recomputation takes 10 ms, a backward pass 20, a copy 0.1, the host nothing.

On virtual devices the real engine takes the same times (tests/emulator/inside/test_engine_time.py).
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.workload import Kernels
from tests.simulator.support import MS, Plain, task, timed_tasks, workload

EXAMPLES = settings(max_examples=60)
N = 4


def makespan(m, checkpoint="always", flavour="current", **switches):
    chosen = Settings(Components(**switches), checkpoint, flavour, nesting_ns=(0, 0))
    return run(workload(m, [task()] * N), Plain(), chosen).makespan_ns / MS


@pytest.mark.parametrize("flavour", ["current", "published"])
@pytest.mark.parametrize(
    ("checkpoint", "early", "expected"),
    [
        ("always", True, [130.6, 250.6, 410.6]),
        ("always", False, [160.6, 280.6, 440.6]),
        ("except_last", True, [120.6, 240.6, 400.6]),
        ("never", True, [120.6, 210.6, 330.6]),
    ],
)
def test_with_everything_else_on(checkpoint, early, expected, flavour):
    assert [makespan(m, checkpoint, flavour, early_recompute=early) for m in (1, 4, 8)] == expected


@pytest.mark.parametrize(("m", "least", "most"), [(1, 160.6, 160.6), (4, 282.0, 352.1), (8, 443.6, 804.2)])
def test_copies_on_compute_streams_stall_them_as_much_as_on_virtual_devices(m, least, most):
    # The real engine's host threads race; see the module's docstring.
    assert least <= makespan(m, copy_streams=False) <= most


@pytest.mark.parametrize(
    ("m", "measured"), [(1, {130.6}), (4, {280.6, 290.6, 300.6}), (8, {500.6, 510.6, 520.6, 540.6})]
)
def test_without_fork_and_join_the_pipeline_fills_late(m, measured):
    assert makespan(m, fork_join=False) in measured


@EXAMPLES
@given(
    m=st.integers(1, 6),
    n=st.integers(1, 4),
    components=st.sampled_from(list(Components.factorial())),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    flavour=st.sampled_from(["current", "published"]),
    transfer=st.sampled_from(["direct", "host"]),
    shared=st.booleans(),
)
def test_everything_runs_once_and_nothing_twice_at_a_time(m, n, components, checkpoint, flavour, transfer, shared):
    devices = (0,) * n if shared else tuple(range(n))
    chosen = Settings(components, checkpoint, flavour, transfer, devices)
    machine = Plain(launch_ns=10_000, queue_depth=3)
    found = run(workload(m, [task(launches=2)] * n, [(0, n - 1)] * (n > 1)), machine, chosen)
    recomputed = {"always": m, "except_last": m - 1, "never": 0}[checkpoint]
    events = found.events
    assert [sum(event.kind == kind for event in events) for kind in ("forward", "recompute", "backward")] == [
        m * n,
        recomputed * n,
        m * n,
    ]
    for device in set(devices):
        spans = sorted(
            (event.start_us, event.end_us)
            for event in events
            if event.device == f"cuda:{device}" and event.kind in {"forward", "recompute", "backward"}
        )
        assert all(one[1] <= other[0] for one, other in itertools.pairwise(spans))
    assert run(workload(m, [task(launches=2)] * n, [(0, n - 1)] * (n > 1)), machine, chosen).events == events


def test_a_slow_host_is_the_bound():
    # One launch a forward pass, one a backward pass, and nothing else to wait for.
    work = workload(5, [task(forward=1, backward=1)])
    found = run(work, Plain(launch_ns=100), Settings(checkpoint="never"))
    assert found.makespan_ns == 5 * 2 * 100


@pytest.mark.parametrize("permille", [1000, 1500])
@pytest.mark.parametrize("transfer", ["direct", "host"])
def test_threads_that_share_an_interpreter_launch_in_turns(permille, transfer):
    work = workload(4, [task(forward=1, backward=1, launches=10)] * 2)
    chosen = Settings(checkpoint="never", schedule="gpipe", transfer=transfer)
    free, locked = (
        run(work, Plain(copy=0, launch_ns=100, lock_permille=lock), chosen).makespan_ns for lock in (0, permille)
    )
    each = 4 * 2 * 10 * 100
    assert each < free < 1.5 * each
    assert 2 * each <= locked <= 2.5 * each * permille / 1000


def test_a_thread_alone_has_the_interpreter_for_itself():
    work = workload(5, [task(forward=1, backward=1)])
    found = run(work, Plain(launch_ns=100, lock_permille=1500), Settings(checkpoint="never"))
    assert found.makespan_ns == 5 * 2 * 100


def test_the_host_runs_ahead_no_further_than_the_launch_queue():
    work = workload(6, [task(forward=100, backward=100, launches=10)])
    free, bounded = (
        run(work, Plain(launch_ns=1, queue_depth=depth), Settings(checkpoint="never")) for depth in (0, 20)
    )
    assert free.makespan_ns == bounded.makespan_ns
    issued = [(issued.issue_ns, issued.start_ns) for issued in timed_tasks(bounded)]
    # Twenty launches are two tasks; a third is begun when the queue has room for the end of the one before.
    assert all(start - issue <= 200 for issue, start in issued)
    assert max(one.start_ns - one.issue_ns for one in timed_tasks(free)) > 400


def test_a_second_step_begins_when_its_first_device_is_free():
    # Which is the last to end.
    work = workload(4, [task()] * N, optimizer=(Kernels(MS),) * N)
    one, two = (run(work, Plain(), Settings(checkpoint="always", steps=steps)) for steps in (1, 2))
    assert two.step_ends_ns[0] == one.step_ends_ns[0]
    assert two.makespan_ns == 2 * one.makespan_ns == 2 * (one.step_ends_ns[0] + MS)
    assert len(two.events) == 2 * len(one.events)


@pytest.mark.parametrize("ends", [(10, 20, 100), (80, 90, 100), (33, 66, 100)])
@pytest.mark.parametrize("depth", [3, 4, 5, 6])
def test_a_launch_leaves_the_queue_when_its_kernel_has_run(ends, depth):
    """The thread issues a task, and goes on when the queue has room for all of its launches."""
    forward = Kernels(100, 3, ends_ns=ends)
    work = workload(3, [replace(task(backward=1), forward=forward)])
    issued = timed_tasks(run(work, Plain(queue_depth=depth), Settings(checkpoint="never")))
    ran = [100 * i + end for i in range(3) for end in ends]
    # Before the second task three launches are queued, before the third six.
    room = [ran[count - depth - 1] if count > depth else 0 for count in (3, 6)]
    assert [one.issue_ns for one in issued[:3]] == [0, *room]
