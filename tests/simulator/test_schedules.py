"""Schedules on the clock: where the host and copies take no time, they take the time that their definition says."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from gpipe_bench.components import Components
from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import (
    SCHEDULES,
    Durations,
    Schedule,
    merged_order,
    named_schedule,
    timing,
    with_recomputation,
)
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES, checkpoint_stop
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from gpipe_bench.simulator.steps.run import run
from gpipe_bench.simulator.steps.settings import Settings
from tests.simulator.support import Plain, task, timed_tasks, workload
from tests.simulator.test_lives import heavy

KINDS = {"forward": "F", "recompute": "R", "backward": "B", "backward_inputs": "I", "backward_weights": "W"}
DOUBLE = TWO_PER_DEVICE


def partitions(name, devices):
    return devices * (2 if name in DOUBLE else 1)


def placed(name, n):
    return named_schedule(name, 1, n, n // (2 if name in DOUBLE else 1)).placement


def starts(work, machine, chosen):
    done = run(work, machine, chosen)
    found = {(KINDS[one.kind], one.i, one.j): one.start_ns for one in timed_tasks(done) if one.kind in KINDS}
    return found, done.makespan_ns


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_action_starts_when_it_can(name, checkpoint):
    for (m, devices), workers in product(((1, 1), (1, 2), (4, 3), (9, 4)), (True, False)):
        n = partitions(name, devices)
        schedule = with_recomputation(named_schedule(name, m, n, devices), checkpoint_stop(checkpoint, m))
        expected = timing(schedule, Durations(10, 12, 12))
        work = workload(m, [task(10, 24, 2)] * n)
        chosen = Settings(checkpoint=checkpoint, schedule=name, memory=False, workers=workers)
        found, makespan = starts(work, Plain(copy=0), chosen)
        assert found == {tuple(action): start for action, start in expected.start.items()}, (m, devices)
        assert makespan == expected.makespan


@pytest.mark.parametrize("name", SCHEDULES)
def test_skips_change_no_order(name):
    n = partitions(name, 4)
    for portals in (True, False):
        work = workload(6, [task(10, 24, 2)] * n, [(0, 1), (0, n - 1), (1, n - 2)])
        chosen = Settings(Components(portals=portals), "never", schedule=name, memory=False)
        expected = timing(named_schedule(name, 6, n, 4), Durations(10, 12, 12))
        assert starts(work, Plain(copy=0), chosen)[1] == expected.makespan


def test_a_schedule_of_ones_own():
    first = [("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)]
    second = [("F", 0, 1), ("B", 0, 1), ("F", 1, 1), ("B", 1, 1)]
    own = Schedule.of([first, second])
    found, _ = starts(workload(2, [task(10, 20)] * 2), Plain(copy=0), Settings(schedule=own, checkpoint="never"))
    assert found == {tuple(action): start for action, start in timing(own, Durations(10, 10, 10)).start.items()}


def test_a_schedule_for_other_numbers():
    own = named_schedule("1f1b", 3, 2, 2)
    with pytest.raises(ValueError, match="schedule must be for 4 micro-batches and 2 partitions, got one for 3"):
        run(workload(4, [task()] * 2), Plain(), Settings(schedule=own))
    with pytest.raises(ScheduleError, match="must have two partitions for each device"):
        run(workload(4, [task()] * 3), Plain(), Settings(schedule="zb_v"))


def test_recomputation_is_early_or_late():
    work, machine = workload(4, [task()] * 3), Plain(copy=50_000_000)
    early, late = (
        starts(work, machine, Settings(Components(early_recompute=on), "always", schedule="1f1b"))[1]
        for on in (True, False)
    )
    assert early < late


def test_a_loss_for_each_microbatch():
    loss = task(0, 100).backward
    work = replace(workload(4, [task(10, 20)] * 2), loss=loss)
    chosen = Settings(schedule="gpipe", checkpoint="never", memory=False)
    alone = starts(replace(work, loss=replace(loss, duration_ns=0, launches=0)), Plain(copy=0), chosen)[1]
    assert starts(work, Plain(copy=0), chosen)[1] == alone + 100


def test_fewer_activations_in_flight_take_less_memory():
    peaks = []
    for name in ("gpipe", "1f1b"):
        work = workload(8, [heavy(forward=10, backward=20)] * 3)
        chosen = Settings(schedule=name, checkpoint="never", steps=2)
        peaks.append(run(work, Plain(copy=1), chosen).peak_live_bytes)
    gpipe, one_f_one_b = peaks
    assert all(one > 2 * other for one, other in zip(gpipe, one_f_one_b, strict=True))


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_is_left_behind(name):
    n = partitions(name, 2)
    one, three = (
        run(
            workload(6, [heavy(forward=10, backward=20)] * n),
            Plain(copy=1),
            Settings(checkpoint="except_last", schedule=name, steps=steps),
        ).peak_live_bytes
        for steps in (1, 3)
    )
    assert one == three


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_thread_takes_all_actions_in_one_order(name):
    n = partitions(name, 3)
    schedule = with_recomputation(named_schedule(name, 5, n, 3), 4)
    chosen = Settings(schedule=name, memory=False, workers=False)
    done = run(workload(5, [task(10, 24)] * n), Plain(copy=0), chosen)
    issued = [(KINDS[one.kind], one.i, one.j) for one in timed_tasks(done) if one.kind in KINDS]
    assert issued == [tuple(action) for action in merged_order(schedule)]


def test_recomputations_of_a_schedule_of_ones_own():
    own = with_recomputation(named_schedule("1f1b", 4, 3, 3), 2)
    work, machine = workload(4, [task(10, 24)] * 3), Plain(copy=0)
    runs = [starts(work, machine, Settings(checkpoint="never", schedule=one)) for one in (own, own)]
    assert (
        runs[0]
        == runs[1]
        == (
            {tuple(action): start for action, start in timing(own, Durations(10, 12, 12)).start.items()},
            timing(own, Durations(10, 12, 12)).makespan,
        )
    )


def test_a_row_is_on_one_device():
    work = workload(4, [task()] * 4)
    with pytest.raises(ValueError, match=r"devices must be the same for partitions 0 and 3, .* use"):
        run(work, Plain(), Settings(schedule="zb_v", devices=(0, 1, 1, 2)))


def test_a_schedule_with_halves_needs_a_workload_with_halves():
    work = workload(4, [replace(task(), split=None)] * 2)
    with pytest.raises(ValueError, match=r"workload must be split into I and W.*build it with split=True"):
        run(work, Plain(), Settings(schedule="zb_h1"))
    assert run(work, Plain(), Settings(schedule="1f1b")).makespan_ns
