"""Many comparisons at once: values known from the procedure, and from counting deals."""

from __future__ import annotations

import math

import pytest

from gpipe_bench.bench.evaluation.statistics import enough_repeats, holm, repeats_needed, shift


def test_holm_steps_down():
    """0.01 x 4, 0.02 x 3, 0.03 x 2 and 0.04 x 1, none below the one before, in the order of the tests."""
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])


def test_holm_of_one_test_and_of_none():
    assert holm([0.03]) == [0.03]
    assert holm([]) == []
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_more_cells_need_more_repeats():
    """The smallest p of n against n is 2 / C(2n, n): 2/70, 2/252, 2/924, 2/3432 from four on."""
    assert [repeats_needed(tests) for tests in (1, 2, 7, 23, 85)] == [4, 5, 6, 6, 7]
    assert enough_repeats(5, 5, tests=6)
    assert not enough_repeats(5, 5, tests=7)


def test_two_repeats_of_many_cells_show_a_shift():
    cells = [([10.5 * size, 10.6 * size], [10.0 * size, 10.1 * size]) for size in range(1, 13)]
    found = shift(cells)
    assert found.cells == 12
    assert found.p_value < 0.01
    assert found.ratio.low < found.ratio.median < found.ratio.high
    assert found.ratio.median == pytest.approx(10.55 / 10.05, rel=1e-3)


def test_cells_that_differ_both_ways_are_no_shift():
    up, down = ([11.0, 11.1], [10.0, 10.1]), ([10.0, 10.1], [11.0, 11.1])
    found = shift([up, down, up, down])
    assert found.ratio.median == pytest.approx(1)
    assert found.p_value > 0.5


def test_equal_sets_are_no_shift():
    assert shift([([1.0, 2.0], [2.0, 1.0])] * 3).p_value == 1


def test_single_repeats_have_no_interval():
    assert math.isnan(shift([([2.0], [1.0])]).ratio.low)


@pytest.mark.parametrize("pairs", [[], [([], [1.0])], [([0.0], [1.0])]])
def test_what_cannot_be_compared(pairs):
    with pytest.raises(ValueError, match="pairs must be positive"):
        shift(pairs)
