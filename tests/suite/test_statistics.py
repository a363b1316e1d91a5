"""Comparisons against values known from tables and by hand."""

from __future__ import annotations

import math

import pytest

from gpipe_bench.results.intervals import compare_samples, differ, enough_repeats, repeats_needed
from gpipe_bench.suite.evaluation.compare import compare_rows
from gpipe_bench.suite.running.run import failed_result
from tests.suite.cells_of import cell, ok_result


def test_sides_without_overlap():
    """Of the C(8,4) = 70 ways to deal out eight ranks, two separate the sides completely."""
    sides = [5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]
    comparison = compare_samples(*sides)
    assert comparison.p_value == pytest.approx(2 / 70)
    assert differ(*sides)
    assert comparison.ratio.median == pytest.approx(6.5 / 2.5)
    assert 1 < comparison.ratio.low < comparison.ratio.median < comparison.ratio.high


def test_sides_that_interleave():
    """U = 10 of 16; the exact two-sided p of 4 against 4 there is 48/70."""
    sides = [2.0, 4.0, 6.0, 8.0], [1.0, 3.0, 5.0, 7.0]
    assert compare_samples(*sides).p_value == pytest.approx(48 / 70)
    assert not differ(*sides)


def test_three_against_three_can_show_nothing():
    """2 of C(6,3) = 20 deals separate the sides: p = 0.1 at best."""
    sides = [101.0, 102.0, 103.0], [1.0, 2.0, 3.0]
    assert compare_samples(*sides).p_value == pytest.approx(0.1)
    assert not differ(*sides)


@pytest.mark.parametrize(
    ("n", "reference", "enough"), [(1, 1, False), (3, 3, False), (4, 4, True), (3, 5, True), (1, 39, True)]
)
def test_how_many_repeats_can_show_a_difference(n, reference, enough):
    assert enough_repeats(n, reference) is enough


def test_more_cells_need_more_repeats():
    """The smallest p of n against n is 2 / C(2n, n): 2/70, 2/252, 2/924, 2/3432 from four on."""
    assert [repeats_needed(tests) for tests in (1, 2, 7, 23, 85)] == [4, 5, 6, 6, 7]
    assert enough_repeats(5, 5, tests=6)
    assert not enough_repeats(5, 5, tests=7)


def test_direction_does_not_matter_for_the_test():
    high, low = [5.0, 6.0, 7.0, 8.0, 9.0], [1.0, 2.0, 3.0, 4.0]
    assert compare_samples(high, low).p_value == compare_samples(low, high).p_value
    assert compare_samples(low, high).ratio.median == pytest.approx(2.5 / 7)


def test_the_same_samples_give_the_same_numbers():
    sides = ([3.0, 1.0, 2.0, 5.0], [2.0, 2.5, 1.5, 1.0])
    assert compare_samples(*sides) == compare_samples(*sides)


@pytest.mark.parametrize(("samples", "reference"), [([], [1.0]), ([1.0], []), ([math.nan], [1.0]), ([1.0], [0.0])])
def test_what_cannot_be_compared(samples, reference):
    with pytest.raises(ValueError, match="must be"):
        compare_samples(samples, reference)


def rows(variant, *throughputs, **values):
    return [ok_result(variant, repeat, value, **values).row for repeat, value in enumerate(throughputs)]


def test_two_result_sets_are_compared_cell_by_cell():
    new = [*rows("baseline", 22, 24, 26, 28), *rows("dep-x-ptl", 5)]
    old = [*rows("baseline", 11, 12, 13, 14, torch="2.11.0"), *rows("dep-x-x", 7)]
    found = {comparison.row.variant: comparison for comparison in compare_rows(new, old)}
    assert list(found) == ["baseline", "dep-x-x", "dep-x-ptl"]
    base = found["baseline"].comparison
    assert base is not None
    assert (base.ratio.median, found["baseline"].verdict) == (2.0, "differs")
    assert (found["dep-x-x"].status, found["dep-x-x"].reference_status) == ("missing", "ok")
    assert (found["dep-x-ptl"].status, found["dep-x-ptl"].reference_status) == ("ok", "missing")
    assert found["dep-x-x"].comparison is found["dep-x-ptl"].comparison is None


def test_a_cell_that_fails_now_shows_its_status():
    failed = failed_result(cell(variant="baseline"), 1, "oom", "MemoryError").row
    (found,) = compare_rows([*rows("baseline", 10), failed], rows("baseline", 10))
    assert (found.status, found.reference_status) == ("oom", "ok")


def test_other_columns_can_be_compared():
    (found,) = compare_rows(rows("baseline", 10), rows("baseline", 10, peak_allocated_gib=0.25), "peak_allocated_gib")
    assert found.comparison is not None
    assert found.comparison.ratio.median == 0.5
    with pytest.raises(ValueError, match="metric must be a column of a row, got 'peak'"):
        compare_rows([], [], "peak")
