"""The schedule of GPipe in virtual time, beside autograd; on virtual devices it is held against the engine."""

from __future__ import annotations

from itertools import product

import pytest

from gpipe_bench.components import Components
from gpipe_bench.simulator.steps.run import Settings, run
from tests.simulator.support import MS, Plain, order, task, timed_tasks, workload

N, M = 3, 4


def scheduled(tasks=None, skips=(), checkpoint="always", machine=None, **switches):
    work = workload(M, tasks or [task()] * N, skips)
    chosen = Settings(Components(**switches), checkpoint, schedule="gpipe")
    return run(work, machine or Plain(), chosen)


@pytest.mark.parametrize("switches", [{}, {"fork_join": False}, {"clock_cycle": False}, {"copy_streams": False}])
@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [("always", "R3 B3 R2 B2 R1 B1 R0 B0"), ("except_last", "B3 R2 B2 R1 B1 R0 B0"), ("never", "B3 B2 B1 B0")],
)
def test_every_device_goes_from_the_last_microbatch_to_the_first(checkpoint, expected, switches):
    names = order(scheduled(checkpoint=checkpoint, **switches), "RB")
    for j in range(N):
        assert " ".join(name[:2] for name in names if name.endswith(f",{j}")) == expected


def test_a_task_waits_for_the_gradients_of_the_next_partition():
    found = scheduled(machine=Plain(copy=2 * MS))
    ends = {(one.kind, one.i, one.j): one.end_ns for one in timed_tasks(found)}
    starts = {(one.kind, one.i, one.j): one.start_ns for one in timed_tasks(found)}
    for i in range(M):
        for j in range(N - 1):
            assert starts["backward", i, j] >= ends["copy_grad", i, j + 1]


def test_it_takes_as_long_as_autograd_in_order():
    work = workload(M, [task()] * N, ((0, 2),))
    times = [run(work, Plain(), Settings(Components(), schedule=way)).makespan_ns for way in (None, "gpipe")]
    assert times[0] == times[1]


def test_gradients_of_skips_go_home_by_their_portals():
    names = order(scheduled(skips=((0, 2), (1, 2))), "cp")
    assert [name for name in names if name.startswith("p")] == [f"p{i},2" for i in (3, 3, 2, 2, 1, 1, 0, 0)]
    assert "p" not in {name[0] for name in order(scheduled(skips=((0, 2),), portals=False), "cp")}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
def test_a_partition_that_learns_nothing_has_no_backward_pass(schedule):
    work = workload(M, [task(learns=False), task(returns=(False,)), task()])
    kinds = {
        (one.kind, one.j) for one in timed_tasks(run(work, Plain(), Settings(checkpoint="never", schedule=schedule)))
    }
    back = {"backward"} if schedule == "1f1b" else {"backward_inputs", "backward_weights"}
    assert kinds == {
        *product(["forward"], range(N)), *product(back, (1, 2)), ("copy", 1), ("copy", 2), ("copy_grad", 2)
    }  # fmt: skip
