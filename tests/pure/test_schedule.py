"""Schedules, laid out as pictures."""

import pytest

from gpipe_bench.schedules.cycles import CHECKPOINT_MODES, checkpoint_stop, clock_cycles, ideal_bubble, microbatch_major


def picture(cycles, n):
    """A line per cycle, a column per partition: the micro-batch there, or a dot."""
    return "\n".join(
        " ".join(next((str(i) for i, j in cycle if j == column), ".") for column in range(n)) for cycle in cycles
    )


@pytest.mark.parametrize(
    ("m", "n", "expected"),
    [
        (4, 3, "0 . .\n1 0 .\n2 1 0\n3 2 1\n. 3 2\n. . 3"),
        (2, 4, "0 . . .\n1 0 . .\n. 1 0 .\n. . 1 0\n. . . 1"),
        (3, 1, "0\n1\n2"),
        (1, 3, "0 . .\n. 0 .\n. . 0"),
        (1, 1, "0"),
    ],
)
def test_clock_cycles(m, n, expected):
    assert picture(clock_cycles(m, n), n) == expected


def test_tasks_of_a_cycle_ascend_by_partition():
    assert list(clock_cycles(4, 3))[2] == [(2, 0), (1, 1), (0, 2)]


@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0)])
def test_nothing_to_do_gives_no_cycles(m, n):
    assert list(clock_cycles(m, n)) == []
    assert list(microbatch_major(m, n)) == []


def test_microbatch_major_runs_one_task_at_a_time():
    assert picture(microbatch_major(2, 3), 3) == "0 . .\n. 0 .\n. . 0\n1 . .\n. 1 .\n. . 1"


@pytest.mark.parametrize("order", [clock_cycles, microbatch_major])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 5), (8, 4), (5, 5)])
def test_every_task_runs_once_after_those_it_needs(order, m, n):
    when = {task: k for k, cycle in enumerate(order(m, n)) for task in cycle}
    assert sorted(when) == [(i, j) for i in range(m) for j in range(n)]
    assert sum(len(cycle) for cycle in order(m, n)) == m * n
    assert all(when[i, j] > when[i, j - 1] for i, j in when if j > 0)
    assert all(when[i, j] > when[i - 1, j] for i, j in when if i > 0)


@pytest.mark.parametrize(
    ("checkpoint", "stops"), [("always", [0, 1, 2, 5]), ("except_last", [0, 0, 1, 4]), ("never", [0, 0, 0, 0])]
)
def test_checkpoint_stop_counts_actual_microbatches(checkpoint, stops):
    assert [checkpoint_stop(checkpoint, m) for m in (0, 1, 2, 5)] == stops


def test_checkpoint_modes_are_those_with_a_stop():
    assert all(checkpoint_stop(mode, 3) in (0, 2, 3) for mode in CHECKPOINT_MODES)


@pytest.mark.parametrize(("m", "n", "share"), [(1, 1, 0.0), (8, 1, 0.0), (1, 4, 0.75), (4, 4, 3 / 7), (32, 8, 7 / 39)])
def test_ideal_bubble(m, n, share):
    assert ideal_bubble(m, n) == pytest.approx(share)
    cycles = list(clock_cycles(m, n))
    slots = len(cycles) * n
    assert 1 - sum(map(len, cycles)) / slots == pytest.approx(share)
