"""The schedules by name: complete, as drawn, with the memory and the bubble that their papers give."""

from __future__ import annotations

import inspect
import re
from collections import Counter

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe
from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import SCHEDULES, Durations, check, drawn, in_flight, named_schedule, timing, to_csv
from gpipe_bench.schedules.actions import in_pairs
from gpipe_bench.schedules.dual_pipe import dualpipe_v
from gpipe_bench.schedules.one_f_one_b import gpipe, interleaved, looped_bfs, one_f_one_b
from gpipe_bench.schedules.search import zb_1p, zb_2p
from gpipe_bench.schedules.table import LOOP, TWO_PER_DEVICE, device_count, partition_count, placement
from gpipe_bench.schedules.v_shape import v_half, v_min, zb_v
from gpipe_bench.schedules.zero_bubble import interleaved_zb, zb_h1, zb_h2
from gpipe_bench.simulator import simulate

PICTURES = {
    gpipe: (4, 3),
    one_f_one_b: (4, 3),
    interleaved: (2, 4, 2),
    interleaved_zb: (2, 4, 2),
    looped_bfs: (2, 4, 2),
    zb_h1: (4, 3),
    zb_h2: (5, 3),
    zb_1p: (4, 3),
    zb_2p: (5, 3),
    zb_v: (3, 2),
    v_half: (2, 2),
    v_min: (2, 2),
    dualpipe_v: (2, 2),
}


def partitions(name, devices, v=2):
    return devices * (1 if name not in TWO_PER_DEVICE else v if name in LOOP else 2)


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_size_can_run(name):
    for devices in range(1, 9):
        for m in range(1, 10):
            for v in (1, 2, 3) if name in LOOP else (2,):
                n = partitions(name, devices, v)
                facts = check(named_schedule(name, m, n, devices))
                assert (facts.microbatches, facts.partitions) == (m, n)
                kinds = Counter(action.kind for action in facts.order)
                assert kinds["F"] == kinds["B"] + kinds["I"] == kinds["B"] + kinds["W"] == m * n


@pytest.mark.parametrize("function", PICTURES, ids=lambda function: function.__name__)
def test_the_picture_in_the_docstring_is_the_schedule(function):
    picture = re.findall(r"^ *(device \d.*)$", inspect.getdoc(function), flags=re.MULTILINE)
    assert "\n".join(picture) == drawn(function(*PICTURES[function]))


@pytest.mark.parametrize("n", range(1, 9))
def test_activations_in_flight(n):
    m = 3 * n
    held = {name: check(named_schedule(name, m, partitions(name, n), n)).in_flight for name in SCHEDULES}
    assert held["gpipe"] == (m,) * n
    assert held["1f1b"] == tuple(n - j for j in range(n))
    assert max(held["zb_h1"]) == n
    assert max(held["zb_1p"]) == n
    assert max(held["zb_h2"]) == 2 * n - 1
    assert max(held["zb_2p"]) == 2 * n
    # Partitions of the schedules with two on each device have half the size.
    assert max(held["zb_v"]) == 2 * n
    assert max(held["v_half"]) <= n + 2
    assert max(held["v_min"]) <= 2 * (n + 4) / 3
    assert held["dualpipe_v"] == (2 * n + 1,) * n
    assert held["looped_bfs"] == (2 * m,) * n
    # Megatron-LM, section 2.2: n (1 + (n - 1) / (2 n)) whole partitions, and one half more.
    assert max(held["interleaved"]) == 2 * n + n - 1


@pytest.mark.parametrize("n", [1, 2, 4, 8])
@pytest.mark.parametrize("m", [8, 16, 24])
def test_bubbles_are_those_of_the_papers(m, n):
    idle = {name: _idle(named_schedule(name, m, partitions(name, n), n), m) for name in SCHEDULES}
    assert idle["gpipe"] == idle["1f1b"] == 3 * (n - 1)
    assert idle["interleaved"] == idle["looped_bfs"] == 1.5 * (n - 1)
    # T_F + T_B - T_W for every device but one: a third of 1F1B's.
    assert idle["zb_h1"] == idle["zb_1p"] == n - 1
    # Half a unit for every device that the first micro-batch comes through, from 2 p - 1 micro-batches on.
    assert m < 2 * n or idle["zb_v"] == idle["dualpipe_v"] == 0.5 * (n - 1)
    # Half of 1F1B's, to half a unit.
    assert idle["v_half"] <= 1.5 * (n - 1)
    # Two thirds of 1F1B's, to half a unit.
    assert idle["v_min"] <= 2 * (n - 1) + 0.5


def _idle(schedule, m):
    """The makespan less the work of a device, in units of a whole device's forward pass."""
    v = schedule.partitions // len(schedule.devices)
    return timing(schedule, Durations(1 / v, 1 / v, 1 / v)).makespan - 3 * m


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("name", ["zb_h2", "zb_2p", "zb_v"])
def test_three_schedules_have_no_pause_between_first_and_last_action(name, n):
    for m in range(2 * n - 1, 4 * n + 1):
        found = timing(named_schedule(name, m, partitions(name, n), n))
        assert found.spans == found.busy
        assert found.span_bubble == 0


@pytest.mark.parametrize("p", range(2, 9))
def test_what_the_page_says_of_zb_1p_and_zb_2p(p):
    for m in range(1, 3 * p):
        automatic, by_hand = (timing(named_schedule(name, m, p, p)) for name in ("zb_2p", "zb_h2"))
        assert max(automatic.spans) <= max(by_hand.spans)
        assert automatic.makespan <= by_hand.makespan
        assert m <= p or named_schedule("zb_1p", m, p, p) == named_schedule("zb_h1", m, p, p)


@pytest.mark.parametrize("p", range(3, 10))
def test_lengths_and_memory_of_v_half_and_v_min(p):
    """As their authors' lists have them, in units of a pass through a half."""
    half, least = (named_schedule(name, 3 * p, 2 * p, p) for name in ("v_half", "v_min"))
    assert timing(half).makespan - 18 * p == (3 * p - 7 if p % 2 == 0 else 3 * p - 4)
    assert timing(least).makespan - 18 * p == (4 * p - 7 if p % 3 == 0 else 4 * p - 5)
    assert max(in_flight(half)) == p + 2 - p % 2
    assert max(in_flight(least)) == (p + 4) // 3 * 2


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 4), (4, 1), (8, 4), (32, 8)])
def test_the_bubble_of_gpipe_is_the_ideal_one(m, n):
    assert check(gpipe(m, n)).bubble(2, 3, 1) == pytest.approx((n - 1) / (m + n - 1))


def test_which_schedules_end_their_forward_passes_first():
    first = {name for name in SCHEDULES if named_schedule(name, 4, partitions(name, 2), 2).forwards_first}
    assert first == {"gpipe", "looped_bfs"}


def test_partitions_lie_where_the_papers_put_them():
    assert {function(2, 6, 3).placement for function in (interleaved, interleaved_zb, looped_bfs)} == {
        (0, 1, 2, 0, 1, 2)
    }
    assert (
        zb_v(2, 3).placement
        == v_half(2, 3).placement
        == v_min(2, 3).placement
        == dualpipe_v(2, 3).placement
        == (0, 1, 2, 2, 1, 0)
    )


@pytest.mark.parametrize(("m", "p"), [(2, 1), (8, 4), (10, 4), (7, 3)])
def test_dualpipe_v_is_pytorchs_own(m, p):
    torch = pytest.importorskip("torch.distributed.pipelining.schedules")
    own = torch.ScheduleDualPipeV.__new__(torch.ScheduleDualPipeV)
    own.pp_group_size, own._n_microbatches = p, m
    rows = [",".join(map(str, own._calculate_single_rank_operations(rank))) + "\n" for rank in range(p)]
    assert to_csv(dualpipe_v(m, p)) == "".join(rows)


def test_fewer_micro_batches_than_dualpipe_v_needs_leave_out_the_last_ones():
    few, enough = dualpipe_v(3, 2), dualpipe_v(4, 2)
    assert few.devices == tuple(tuple(action for action in row if action.i < 3) for row in enough.devices)
    pairs = [unit for row in enough.devices for unit in in_pairs(row, enough.pairs) if len(unit) == 2]
    assert few.pairs == {first for first, second in pairs if max(first.i, second.i) < 3}
    check(few)


def test_one_f_one_b_to_the_letter():
    rows = [" ".join(map(str, row)) for row in one_f_one_b(3, 2).devices]
    assert rows == [
        "F(0,0) F(1,0) B(0,0) F(2,0) B(1,0) B(2,0)",
        "F(0,1) B(0,1) F(1,1) B(1,1) F(2,1) B(2,1)",
    ]


def test_in_flight_counts_until_weights_are_done():
    assert in_flight(zb_h1(4, 2)) == (2, 2)


@pytest.mark.parametrize(
    ("name", "m", "n", "devices", "words"),
    [
        ("1f1c", 1, 1, 1, "schedule must be one of gpipe, 1f1b"),
        ("gpipe", 0, 1, 1, "whole numbers of at least 1, got m = 0"),
        ("1f1b", 1.5, 2, 2, "whole numbers of at least 1, got m = 1.5"),
        ("1f1b", 2, 2, 2.0, "whole numbers of at least 1, got m = 2, n = 2, 2.0 devices"),
        ("1f1b", 2, "2", 2, "whole numbers of at least 1, got m = 2, n = '2'"),
        ("zb_h1", 4, 4, 2, "as many partitions as devices, got 4 partitions for 2 devices"),
        ("interleaved", 4, 5, 2, "the same number of partitions for each device"),
        ("v_half", 4, 6, 2, "two partitions for each device"),
    ],
)
def test_what_does_not_fit_is_refused(name, m, n, devices, words):
    with pytest.raises(ScheduleError, match=re.escape(words)):
        named_schedule(name, m, n, devices)


def test_a_schedule_in_a_file_is_named_by_its_path(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(to_csv(zb_v(4, 2)))
    name = str(file)
    assert named_schedule(name, 4, 4, 2) == zb_v(4, 2)
    assert (placement(name, 4), device_count(name, 4), partition_count(name, 7)) == ((0, 1, 1, 0), 2, 4)
    with pytest.raises(ScheduleError, match="must be for 3 micro-batches and 4 partitions on 2 devices, got one for 4"):
        named_schedule(name, 3, 4, 2)


def test_an_engine_and_the_simulator_take_the_path_of_a_schedule(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text(to_csv(one_f_one_b(3, 2)))
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    x = torch.ones(6, 2)
    pipes = [GPipe(layers, [1, 1], devices=["cpu", "cpu"], chunks=3, schedule=one) for one in (str(file), "1f1b")]
    losses = [pipe.step(x, x, lambda y, _: y.sum()) for pipe in pipes]
    assert torch.equal(*losses)
    options = {"balance": [1, 1], "batch_size": 6, "chunks": 3, "profile": "p40", "sample": x}
    own, named = (simulate(layers, schedule=one, **options) for one in (str(file), "1f1b"))
    assert own.step_time_ms == named.step_time_ms
