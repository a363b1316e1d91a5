"""Orders on several devices: today's autograd, and that of the published runs."""

from __future__ import annotations

import pytest

from gpipe_bench.components import Components
from gpipe_bench.simulator.steps.run import Settings, run
from tests.simulator.support import MS, Plain, order, task, timed_tasks, workload
from tests.simulator.test_lives import heavy

N, M = 4, 4
HOST = Plain(launch_ns=10_000, queue_depth=1024)


def orders(checkpoint="always", flavour="current", nesting_ns=(60_000, 60_000), **switches):
    """The backward order of each device, as in tests/emulator/inside/test_engine_order.py."""
    work = workload(M, [task(launches=20)] * N)
    chosen = Settings(Components(**switches), checkpoint, flavour, nesting_ns=nesting_ns, seed=None)
    names = order(run(work, HOST, chosen), "RB")
    return [" ".join(name[:2] for name in names if name.endswith(f",{j}")) for j in range(N)]


@pytest.mark.parametrize("flavour", ["current", "published"])
@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [("always", "R3 B3 R2 B2 R1 B1 R0 B0"), ("except_last", "B3 R2 B2 R1 B1 R0 B0"), ("never", "B3 B2 B1 B0")],
)
@pytest.mark.parametrize("switches", [{}, {"copy_streams": False, "portals": False}, {"clock_cycle": False}])
def test_with_fork_and_join_every_device_goes_from_the_last_microbatch_to_the_first(
    checkpoint, expected, switches, flavour
):
    assert orders(checkpoint, flavour, **switches) == [expected] * N


@pytest.mark.parametrize(
    ("checkpoint", "first"), [("always", "R3 B3"), ("except_last", "B3")], ids=["always", "except_last"]
)
def test_partitions_of_one_device_do_so_too(checkpoint, first):
    work = workload(M, [task(launches=20)] * N)
    names = order(run(work, HOST, Settings(checkpoint=checkpoint, devices=(0,) * N)), "RB")
    for j in range(N):
        own = " ".join(name[:2] for name in names if name.endswith(f",{j}"))
        assert own == f"{first} R2 B2 R1 B1 R0 B0"


def test_without_fork_and_join_the_last_device_recomputes_everything_first():
    assert orders(fork_join=False)[-1] == "R3 R2 R1 R0 B3 B2 B1 B0"


def test_a_checkpoint_runs_as_one_piece_today():
    for row in orders(early_recompute=False, fork_join=False):
        steps = row.split()
        assert [step[1] for step in steps[::2]] == [step[1] for step in steps[1::2]]


@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_devices_without_streams_share_a_thread(checkpoint):
    work = workload(M, [task()] * N)
    several, one = (
        order(
            run(work, Plain(), Settings(checkpoint=checkpoint, transfer="host", devices=devices, streams=False)), "RB"
        )
        for devices in (tuple(range(N)), (0,) * N)
    )
    assert several == one
    assert len(several) == M * N * (2 if checkpoint == "always" else 1)


@pytest.mark.parametrize(("flavour", "waits"), [("current", True), ("published", False)])
def test_a_device_waits_for_the_join_that_the_thread_of_the_one_before_runs(flavour, waits):
    """Join (1,1) releases (0,1). The thread of the first device comes to it when it has issued B2,0."""
    work = workload(3, [task(launches=1000), task()])
    found = run(work, Plain(launch_ns=1000), Settings(checkpoint="never", flavour=flavour))
    issued = {(one.kind, one.i, one.j): one.issue_ns for one in timed_tasks(found)}
    assert (issued["backward", 0, 1] >= issued["backward", 2, 0] + 1000 * 1000) == waits


def test_checkpoints_nest_while_the_root_of_the_first_is_away():
    # The root comes back while the second is prepared, whose own pass is deeper and goes first.
    assert orders(flavour="published", fork_join=False)[-1] == "R3 R2 R1 R0 B2 B3 B0 B1"
    # It comes back when all are nested: last in, first out.
    late = orders(flavour="published", fork_join=False, nesting_ns=(0, 60_000))
    assert late[-1] == "R3 R2 R1 R0 B0 B1 B2 B3"


def copies_of_gradients(flavour):
    work = workload(M, [task(launches=20)] * 2)
    switches = Components(fork_join=False, copy_streams=False, portals=False)
    chosen = Settings(switches, "always", flavour, nesting_ns=(50_000, 60_000), seed=None)
    names = order(run(work, HOST, chosen), "Bc")
    return [name for name in names if name.endswith(",1")]


def test_gradients_wait_for_the_nested_passes_on_top_of_theirs():
    assert copies_of_gradients("current") == ["B3,1", "c3,1", "B2,1", "c2,1", "B1,1", "c1,1", "B0,1", "c0,1"]
    assert copies_of_gradients("published") == ["B1,1", "B2,1", "B3,1", "c3,1", "c2,1", "c1,1", "B0,1", "c0,1"]


@pytest.mark.parametrize(
    ("flavour", "nodes", "expected"),
    [
        ("current", 1, "B3 c3 B2 c2 B1 c1 B0 c0"),
        # Of six nodes the one in the middle counts, here 20, 14, 8 and 2; copies are 11 to 8.
        ("current", 6, "B3 B2 c3 c2 B1 c1 B0 c0"),
        ("current", 40, "B3 B2 B1 B0 c3 c2 c1 c0"),
        # In threads that have made many nodes before.
        ("published", 40, "B3 c3 B2 c2 B1 c1 B0 c0"),
    ],
)
def test_nodes_of_the_calling_thread_are_numbered_from_the_number_of_tasks(flavour, nodes, expected):
    work = workload(M, [task(nodes=nodes)] * 2)
    switches = Components(fork_join=False, copy_streams=False, portals=False)
    names = order(run(work, HOST, Settings(switches, "never", flavour)), "Bc")
    assert " ".join(name[:2] for name in names if name.endswith("1")) == expected


def published_variant(label):
    work = workload(8, [heavy(forward=10 * MS, launches=60)] * N)
    found = run(work, Plain(copy=2 * MS, launch_ns=15_000, queue_depth=1024), Settings(
        Components.from_label(label), "always", "published"))  # fmt: skip
    return found.makespan_ns, sum(found.peak_allocated_bytes), sum(found.peak_reserved_bytes)


def test_the_published_baseline_is_slow_and_needs_much_memory():
    (baseline, baseline_bytes, _), (ordered, ordered_bytes, reserved), (streams, _, more_reserved) = (
        published_variant(label) for label in ("baseline", "dep-x-x", "dep-str-x")
    )
    assert baseline > 1.2 * ordered > 1.2 * streams
    assert baseline_bytes > 1.5 * ordered_bytes
    assert more_reserved > reserved


def test_the_old_engine_costs_the_baseline_more_than_todays():
    work = workload(8, [heavy(launches=60)] * N)
    chosen = [Settings(Components.from_label("baseline"), "always", flavour) for flavour in ("current", "published")]
    today, old = (run(work, Plain(copy=2 * MS, launch_ns=15_000, queue_depth=1024), one) for one in chosen)
    assert old.makespan_ns > today.makespan_ns
    assert sum(old.peak_allocated_bytes) > sum(today.peak_allocated_bytes)
