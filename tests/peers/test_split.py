"""The limit of a step, and the parts of the gap between it and a measured step."""

from __future__ import annotations

import pytest

from gpipe_bench.bench.peers.split import limit_s, makespan, split_gap


def test_the_limit_is_the_bubble_of_balanced_partitions():
    assert limit_s(16.0, m=8, n=2, parallel=2) == 9.0


def test_the_limit_knows_how_many_cores_there_are():
    assert limit_s(64.0, m=8, n=8, parallel=2) == 32.0


def test_one_partition_is_the_plain_loop():
    assert limit_s(5.0, m=8, n=1, parallel=1) == 5.0


def test_balanced_partitions_reach_the_limit():
    assert makespan([1.0, 1.0], [2.0, 2.0], m=8) == 9 * 3.0


def test_the_slowest_partition_sets_the_pace_in_both_directions():
    #   forward: 1 | 3 3 3        backward: the last partition first, 5 5 5 | 2
    assert makespan([1.0, 3.0], [2.0, 5.0], m=3) == (1 + 9) + (15 + 2)


def test_a_fast_partition_in_the_middle_waits():
    assert makespan([2.0, 1.0, 2.0], [0.0, 0.0, 0.0], m=2) == 2 + 2 + 1 + 2


def test_parts_sum_to_the_gap():
    gap = split_gap(7.0, 16.0, 8, alone=[[0.2, 0.3], [0.5, 0.4]], contention_s=2.0, host_s=1.5, copies_s=0.25)
    parts = [gap.imbalance, gap.contention, gap.host, gap.copies, gap.other]
    assert all(part is not None for part in parts)
    assert sum(parts) == pytest.approx(7.0)


def test_equal_partitions_have_no_imbalance_and_what_is_not_known_is_left_in_the_rest():
    alone = [[0.5, 0.5], [0.5, 0.5]]
    gap = split_gap(1.0, 16.0, 8, alone=alone, contention_s=0.0, host_s=None, copies_s=None)
    assert (gap.imbalance, gap.contention, gap.host, gap.copies) == (0.0, 0.0, None, None)
    assert gap.other == 1.0


def test_partition_times_are_scaled_to_the_plain_loop():
    fast, slow = ([[0.2, 0.3], [0.5, 0.4]], [[2.0, 3.0], [5.0, 4.0]])
    gaps = [split_gap(1.0, 16.0, 8, alone=times, contention_s=None, host_s=0, copies_s=0) for times in (fast, slow)]
    assert gaps[0].imbalance == pytest.approx(gaps[1].imbalance)
    assert gaps[0].contention is None
