"""The split of a partition's time, by hand and by its laws."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.results.breakdown import Breakdown, busy_times, mean_breakdown, split_device_time
from gpipe_bench.results.timeline import KINDS, TimelineEvent


def event(kind, j, start, end):
    return TimelineEvent("cpu", "compute", kind, 0, j, start, start, end, 0)


def shares(events, n=1, start=0.0, end=10.0):
    """Compute, recompute, copy, imbalance, bubble of each partition, in tenths of a window of 10."""
    rows = split_device_time(events, range(n), start, end)
    return [tuple(round(share * 10, 9) for share in dataclasses.astuple(row)) for row in rows]


def test_forward_and_backward_are_compute_and_the_rest_is_bubble():
    assert shares([event("forward", 0, 0, 2), event("backward", 0, 5, 9)]) == [(6, 0, 0, 0, 4)]


def test_both_halves_of_a_backward_pass_are_compute():
    events = [event("backward_inputs", 0, 0, 2), event("backward_weights", 0, 5, 9)]
    assert shares(events) == [(6, 0, 0, 0, 4)]


def test_a_copy_counts_only_where_nothing_computes():
    events = [event("forward", 0, 0, 4), event("recompute", 0, 4, 6), event("copy", 0, 3, 8)]
    assert shares(events) == [(4, 2, 2, 0, 2)]


def test_recomputation_counts_only_where_no_forward_or_backward_runs():
    assert shares([event("recompute", 0, 0, 5), event("backward", 0, 3, 7)]) == [(4, 3, 0, 0, 3)]


def test_overlapping_events_count_once():
    events = [event("forward", 0, 0, 4), event("forward", 0, 2, 5), event("forward", 0, 1, 2)]
    assert shares(events) == [(5, 0, 0, 0, 5)]


@pytest.mark.parametrize("kind", ["copy", "copy_grad", "portal", "portal_grad"])
def test_all_copies_count_alike(kind):
    assert shares([event(kind, 0, 1, 4)]) == [(0, 0, 3, 0, 7)]


def test_imbalance_is_what_the_busiest_partition_works_more():
    events = [event("forward", 0, 0, 8), event("forward", 1, 2, 4), event("recompute", 1, 4, 5), event("copy", 1, 1, 2)]
    assert shares(events, n=2) == [(8, 0, 0, 0, 2), (2, 1, 1, 5, 1)]


def test_imbalance_is_no_more_than_the_idle_time():
    events = [event("forward", 0, 0, 8), event("forward", 1, 0, 4), event("copy", 1, 4, 9)]
    assert shares(events, n=2)[1] == (4, 0, 5, 1, 0)


def test_a_partition_without_events_is_imbalance_and_bubble():
    assert shares([event("forward", 0, 0, 7)], n=2)[1] == (0, 0, 0, 7, 3)


def test_a_perfect_pipeline_has_only_its_ideal_bubble():
    # m = 3, n = 2, forward passes of length 1: partition j works from j to j + 3, the step takes 4.
    events = [event("forward", j, i + j, i + j + 1) for i in range(3) for j in range(2)]
    for row in split_device_time(events, range(2), 0.0, 4.0):
        assert row == Breakdown(0.75, 0.0, 0.0, 0.0, 0.25)


def test_events_are_cut_off_at_the_window():
    events = [event("forward", 0, -5, 12), event("forward", 0, 30, 40), event("copy", 0, -3, -1)]
    assert shares(events, start=10.0, end=20.0) == [(2, 0, 0, 0, 8)]


@pytest.mark.parametrize("end", [5.0, 4.0])
def test_an_empty_window_is_refused(end):
    with pytest.raises(ValueError, match=f"end_us must be later than start_us, got 5.0 to {end}"):
        split_device_time([], range(1), 5.0, end)


def test_utilization_is_compute_and_recompute():
    assert Breakdown(0.5, 0.25, 0.125, 0.0, 0.125).utilization_fraction == 0.75


def test_mean_is_taken_share_by_share():
    assert mean_breakdown([Breakdown(1, 0, 0, 0, 0), Breakdown(0, 0.5, 0, 0.25, 0.25)]) == Breakdown(
        0.5, 0.25, 0, 0.125, 0.125
    )


times = st.floats(-5, 15, allow_nan=False)
events = st.builds(
    lambda kind, j, pair: event(kind, j, *sorted(pair)),
    st.sampled_from(KINDS),
    st.integers(0, 2),
    st.tuples(times, times),
)


@given(st.lists(events, max_size=30))
def test_shares_are_fractions_that_add_up_to_one(found):
    for row in split_device_time(found, range(3), 0.0, 10.0):
        values = dataclasses.astuple(row)
        assert sum(values) == pytest.approx(1.0)
        assert all(0.0 <= value <= 1.0 + 1e-12 for value in values)


@given(st.lists(events, max_size=20), st.randoms(use_true_random=False))
def test_the_order_of_events_does_not_matter(found, random):
    mixed = list(found)
    random.shuffle(mixed)
    assert split_device_time(mixed, range(3), 0.0, 10.0) == split_device_time(found, range(3), 0.0, 10.0)


@given(st.lists(events, max_size=20))
def test_some_partition_has_no_imbalance(found):
    assert min(row.imbalance_fraction for row in split_device_time(found, range(3), 0.0, 10.0)) == pytest.approx(0.0)


def test_a_device_is_occupied_by_what_it_runs_and_sends_within_the_window():
    # As with zb_h2, where the first device does not wait for the end of a step; partition 1 gets a copy from device 0.
    spans = [(-30, -10), (-5, 5), (40, 50), (95, 110), (120, 130)]
    tasks = [("forward", 0, 0, *span) for span in spans] + [("copy", 1, 0, 45, 60)]
    first, second = busy_times(tasks, 2, 0, 100)
    assert first == (20, 0, 0, 30)
    assert second == (0, 0, 15, 0)
