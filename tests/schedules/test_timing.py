"""Arithmetic of schedules: durations by partition, transfers, and the bubbles that publications define."""

from __future__ import annotations

import csv
from collections import defaultdict

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules import (
    SCHEDULES,
    Action,
    Durations,
    Schedule,
    check,
    in_flight,
    named_schedule,
    searched,
    timing,
    with_recomputation,
)
from gpipe_bench.schedules.actions import in_pairs
from gpipe_bench.schedules.table import TWO_PER_DEVICE

ONE = Schedule.of([[("F", 0, 0), ("B", 0, 0)], [("F", 0, 1), ("B", 0, 1)]])


@pytest.fixture(scope="module")
def printed():
    """For each setting of Zero Bubble's tables: its values by (schedule or "", metric)."""
    found = defaultdict(dict)
    with (PUBLISHED_FOLDER / "published.csv").open() as file:
        for row in csv.DictReader(file):
            if row["table"] == "zero-bubble":
                model, m, schedule = f"{row['experiment']}-".split("-", 2)
                setting = model, int(row["partitions"]), int(m.removeprefix("m"))
                found[setting][schedule.rstrip("-"), row["metric"]] = float(row["value"])
    assert len(found) == 12
    return found


def durations(values, parts=1):
    return Durations(*(values["", name] / parts for name in ("t_f_ms", "t_b_ms", "t_w_ms")))


def test_each_partition_has_durations_of_its_own():
    found = timing(ONE, [Durations(1, 2, 3), Durations(10, 20, 30)])
    assert list(found.start.values()) == [0, 1, 11, 61]
    assert found.makespan == 66
    assert found.busy == (6, 60)


def test_a_result_takes_time_to_reach_another_device():
    found = timing(ONE, transfer=4)
    assert [*found.start.values(), found.makespan] == [0, 5, 6, 12, 14]


def test_each_pair_of_devices_has_a_transfer_time_of_its_own():
    found = timing(ONE, transfer=[[0, 4], [9, 0]])
    assert [*found.start.values(), found.makespan] == [0, 5, 6, 17, 19]


def test_partitions_on_one_device_need_no_transfer():
    two = Schedule.of([[("F", 0, 0), ("F", 0, 1), ("B", 0, 1), ("B", 0, 0)]])
    assert timing(two, transfer=[[7]]).makespan == 6


def test_a_pair_is_one_action_in_time():
    rows = [[("F", 0, 0), ("F", 1, 0), ("B", 0, 0), ("B", 1, 0)], [("F", 0, 1), ("B", 0, 1), ("F", 1, 1), ("B", 1, 1)]]
    schedule, forward, backward = Schedule.of(rows, [Action("F", 1, 0)]), Action("F", 1, 0), Action("B", 0, 0)
    alone, together = timing(schedule, Durations(1, 2, 1)), timing(schedule, Durations(1, 2, 1), overlap=0.75)
    assert (alone.start[forward], alone.start[backward], alone.makespan) == (1, 5, 12)
    # It starts with the gradient of micro-batch 0, though F needs nothing, and micro-batch 1 leaves it at its end.
    assert together.start[forward] == together.start[backward] == 5
    assert together.end[forward] == together.end[backward] == together.start[Action("F", 1, 1)] == 8
    assert (together.makespan, together.busy) == (15, (7, 8))
    assert timing(with_recomputation(schedule, 1), Durations(1, 2, 1), overlap=0.75).makespan == 13


def test_a_recomputation_parts_its_pair_and_no_other():
    schedule = named_schedule("dualpipe_v", 10, 8, 4)
    for checkpointed in range(11):
        found = with_recomputation(schedule, checkpointed)
        kept = {unit for row in found.devices for unit in in_pairs(row, found.pairs) if len(unit) == 2}
        pairs = {unit for row in schedule.devices for unit in in_pairs(row, schedule.pairs) if len(unit) == 2}
        assert kept == {(first, second) for first, second in pairs if second.i >= checkpointed}


@pytest.mark.parametrize("overlap", [1, 0.9, 0.8, 0.7])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (2, 7), (4, 8), (4, 20), (6, 13), (8, 16), (8, 20)])
def test_the_bubble_of_dualpipe_v_is_the_one_that_its_authors_print(p, m, overlap):
    """README of deepseek-ai/DualPipe: (PP - 1) (F&B + B - 3 W)."""
    found = timing(named_schedule("dualpipe_v", m, 2 * p, p), overlap=overlap)
    assert found.makespan - min(found.busy) == pytest.approx((p - 1) * (3 * overlap + 2 - 3))


def test_pairs_that_wait_for_each_other_are_refused():
    """The second device needs F of the first one's pair for the B that the pair waits for."""
    rows = [[("F", 0, 0), ("B", 0, 0)], [("F", 0, 1), ("B", 0, 1)]]
    schedule = Schedule.of(rows, [Action("F", 0, 0)])
    assert timing(schedule).makespan == 6
    with pytest.raises(ScheduleError, match="deadlock: device 0 waits with F"):
        timing(schedule, overlap=0.9)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_times_and_overlap_must_be_finite_numbers_from_0(value):
    for times in ((value, 1, 1), (1, value, 1), (1, 1, value)):
        with pytest.raises(ScheduleError, match="durations must be 0 or more, got"):
            Durations(*times)
    with pytest.raises(ScheduleError, match="overlap must be 0 or more, got"):
        timing(ONE, overlap=value)


def test_two_definitions_of_the_bubble():
    found = timing(ONE, transfer=4)
    assert found.bubble == 1 - 6 / 28  # of both devices, until the end of the step
    assert found.spans == (14, 3)
    assert found.span_bubble == 1 - 3 / 14  # of the first device, from its first to its last action


@pytest.mark.parametrize(
    ("durations", "transfer"),
    [([Durations()], 0.0), (None, [[0.0]]), (None, [[0.0, 1.0], [0.0]])],
)
def test_durations_and_transfers_for_other_numbers_are_refused(durations, transfer):
    with pytest.raises(ScheduleError, match="one for each"):
        timing(ONE, durations, transfer)


@pytest.mark.parametrize("transfer", [float("nan"), -1.0, [[0.0, float("inf")], [0.0, 0.0]]])
def test_transfers_take_finite_times(transfer):
    with pytest.raises(ScheduleError, match="transfer times must be 0 or more"):
        timing(ONE, None, transfer)


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "zb_h2"])
def test_printed_bubbles_of_zero_bubble(printed, name):
    """All bubbles of table 5 that need no search, from the times of table 9, to the four digits that are printed."""
    for (_, p, m), values in printed.items():
        found = timing(named_schedule(name, m, p, p), durations(values), values["", "t_comm_ms"])
        assert f"{found.span_bubble:.4f}" == f"{values[name, 'span_bubble_fraction']:.4f}"


@pytest.mark.parametrize(("model", "v"), [("1.5B", 3), ("6.2B", 4), ("14.6B", 3), ("28.3B", 2)])
def test_printed_bubbles_of_interleaved_lack_p_transfers(printed, model, v):
    """One layer in each of v partitions of a device. As printed, p transfers of the longest path take no time."""
    for (_, p, m), values in ((key, values) for key, values in printed.items() if key[0] == model):
        transfer, one = values["", "t_comm_ms"], durations(values, v)
        found = timing(named_schedule("interleaved", m, p * v, p), one, transfer)
        bubble = 1 - found.busy[0] / (max(found.spans) - p * transfer)
        assert bubble == pytest.approx(values["interleaved", "span_bubble_fraction"], abs=2e-4)


@pytest.mark.parametrize(("name", "batches"), [("zb_1p", 1), ("zb_2p", 2)])
def test_printed_bubbles_of_searched_schedules(printed, name, batches):
    """Those of up to 16 devices and 48 micro-batches; the paper's own search is better in one, by 0.0013."""
    differences = []
    for (_, p, m), values in printed.items():
        if p * m <= 16 * 48:
            one, transfer = durations(values), values["", "t_comm_ms"]
            schedule = searched(m, p, batches * p, one, transfer, kept=0.5)
            check(schedule)
            bubble = timing(schedule, one, transfer).span_bubble
            differences.append(round(bubble - values[name, "span_bubble_fraction"], 4))
    assert len(differences) == 7
    assert sorted(differences)[:-1] == [0] * 6
    assert max(differences) <= 0.0013


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.75, 1.0])
def test_a_search_keeps_to_its_memory(kept):
    for limit in (1, 2, 5, 7.5, float("inf")):
        schedule = searched(16, 4, limit, kept=kept)
        check(schedule)
        assert kept < 1 or max(in_flight(schedule)) <= limit
        for row in schedule.devices:
            held = 0.0
            for kind, _, _ in row:
                held += {"F": 1.0, "B": -1.0, "I": kept - 1, "W": -kept}[kind]
                assert held <= limit


@pytest.mark.parametrize("kept", [0.1, 0.3, 0.7])
def test_a_share_without_an_exact_binary_fraction_leaves_room_for_all_micro_batches(kept):
    # After some I and W, sums of such shares miss a whole number by a last digit.
    for limit in (1, 2, 3):
        assert check(searched(12, 2, limit, kept=kept)).microbatches == 12


def test_a_schedule_of_several_choices_is_timed_once(monkeypatch):
    timed = []
    searched(8, 4, 4, kept=0.5)  # searches ZB-1p and ZB-2p, too
    monkeypatch.setattr("gpipe_bench.schedules.search.timing", lambda *given: timed.append(given[0]) or timing(*given))
    searched(8, 4, 4, Durations(1.1), kept=0.5)
    assert len(timed) == len(set(timed)) > 1


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 20),
    p=st.integers(1, 8),
    limit=st.integers(1, 17),
    times=st.tuples(*[st.sampled_from([0.5, 1, 1.3, 2])] * 3),
    transfer=st.sampled_from([0, 0.1, 0.3, 1]),
)
@example(m=16, p=8, limit=8, times=(1, 1, 1), transfer=0.1)
def test_a_search_is_never_longer_than_a_named_schedule_in_the_same_memory(m, p, limit, times, transfer):
    own = Durations(*times)
    found = timing(searched(m, p, limit, own, transfer), own, transfer)
    for name in set(SCHEDULES) - set(TWO_PER_DEVICE):
        schedule = named_schedule(name, m, p, p)
        if max(in_flight(schedule)) <= limit:
            other = timing(schedule, own, transfer)
            assert round(max(found.spans) - max(other.spans), 9) <= 0, name


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"limit": 0.5}, "limit must be at least 1 micro-batch, got 0.5"),
        ({"limit": float("nan")}, "limit must be at least 1 micro-batch, got nan"),
        ({"kept": 1.5}, "kept must be a share from 0 to 1, got 1.5"),
        ({"transfer": float("nan")}, "transfer times must be 0 or more, got nan"),
        ({"m": 0}, "micro-batches and partitions must be 1 or more, got 0 and 2"),
    ],
)
def test_a_search_needs_numbers_in_their_ranges(given, words):
    with pytest.raises(ScheduleError, match=words):
        searched(**{"m": 4, "n": 2, "limit": 2, **given})
