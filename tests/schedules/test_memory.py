"""What devices hold, by hand and beside what is in flight; the package of schedules is light."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import (
    SCHEDULES,
    Schedule,
    in_flight,
    memory,
    merged_order,
    named_schedule,
    with_recomputation,
)
from gpipe_bench.schedules.table import partition_count

SPLIT = Schedule.of([[("F", 0, 0), ("F", 1, 0), ("I", 0, 0), ("W", 0, 0), ("B", 1, 0)]])


def values(schedule, **shares):
    return [[(held.during, held.after) for held in row] for row in memory(schedule, **shares)]


def test_from_i_to_w_a_part_is_held():
    assert values(SPLIT, kept=0.25) == [[(1, 1), (2, 2), (2, 1.25), (1.25, 1), (1, 0)]]


def test_a_checkpoint_keeps_its_input_and_the_recomputation_brings_the_rest_back():
    checkpointed = with_recomputation(SPLIT, 1)
    kinds = "".join(action.kind for action in checkpointed.devices[0])
    assert kinds == "FFRIWB"
    assert values(checkpointed, kept=0.5, boundary=0.25) == [
        [(1, 0.25), (1.25, 1.25), (2, 2), (2, 1.5), (1.5, 1), (1, 0)],
    ]


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_peak_is_what_is_in_flight(name):
    for p, m in ((1, 1), (3, 7), (4, 9)):
        schedule = named_schedule(name, m, partition_count(name, p), p)
        assert tuple(max(held.during for held in row) for row in memory(schedule)) == in_flight(schedule)
        assert all(row[-1].after == pytest.approx(0) for row in memory(schedule, 0.3))


def test_checkpoints_need_less():
    schedule = named_schedule("gpipe", 8, 4, 4)
    peaks = [max(held.during for held in row) for row in memory(with_recomputation(schedule, 8), boundary=0.1)]
    assert peaks == pytest.approx([1.7] * 4)


@pytest.mark.parametrize("shares", [{"kept": 1.5}, {"boundary": float("nan")}])
def test_shares_are_from_0_to_1(shares):
    (name,) = shares
    with pytest.raises(ScheduleError, match=f"{name} must be a share from 0 to 1"):
        memory(SPLIT, **shares)


def test_the_order_of_a_schedule_is_computed_once(monkeypatch):
    schedule = named_schedule("zb_h1", 4, 3, 3)
    first = merged_order(schedule)
    first.clear()
    monkeypatch.setattr("gpipe_bench.schedules.order._missing", lambda *_: pytest.fail("computed again"))
    order = merged_order(schedule)
    assert sorted(order) == sorted(schedule)
    assert [one for one in order if one.j == 1] == list(schedule.devices[1])


def test_each_set_of_pairs_has_an_order_of_its_own():
    schedule = named_schedule("dualpipe_v", 8, 4, 2)
    assert schedule.pairs
    together = {*pairwise(merged_order(schedule, schedule.pairs))}
    after = dict(pair for row in schedule.devices for pair in pairwise(row))
    assert {(one, after[one]) for one in schedule.pairs} <= together
    assert not {(one, after[one]) for one in schedule.pairs} <= {*pairwise(merged_order(schedule))}


def test_schedules_are_imported_without_torch_and_numpy():
    """They run where neither can be installed: in a web page."""
    program = (
        "import sys; import gpipe_bench.schedules; "
        "own = {'gpipe_bench', *sys.stdlib_module_names, '__main__', '__mp_main__'}; "
        "print(*sorted({name.partition('.')[0] for name in sys.modules} - own))"
    )
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
