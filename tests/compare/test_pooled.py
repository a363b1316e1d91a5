"""Many cells with few repeats each: how often a difference is found where there is none, and where there is one.

Every draw is seeded, so that the shares below are always the same.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from gpipe_bench.bench.evaluation.compare import common_scatter, compare_rows
from gpipe_bench.bench.evaluation.pooled import FEWEST_CELLS, compare_pooled, pool_of
from gpipe_bench.bench.evaluation.statistics import holm
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.figures.tables import read_rows

SCATTER = 0.04
DRAWS = 200


def cells(rng, *, count=16, repeats=2, run=0.0, tail=None):
    """Pairs of repeats of cells that are alike in both sets, each with a speed of its own.

    Args:
        rng: what to draw from.
        count: cells.
        repeats: of each cell in each set.
        run: standard deviation of what all repeats of a cell in one run have in common.
        tail: degrees of freedom of the repeats, if they are not normal.
    """

    def repeat():
        one = rng.standard_normal(repeats) if tail is None else rng.standard_t(tail, repeats) * math.sqrt(1 - 2 / tail)
        return SCATTER * one + run * rng.standard_normal()

    return [tuple(10 * (k + 1) * np.exp(repeat()) for _ in range(2)) for k in range(count)]


def adjusted(pairs):
    pool = pool_of(pairs)
    return holm([compare_pooled(new, old, pool).p_value for new, old in pairs])


def share_found(rng, **settings):
    """How often any cell of two sets that are alike differs."""
    return np.mean([min(adjusted(cells(rng, **settings))) <= 0.05 for _ in range(DRAWS)])


@pytest.mark.parametrize(
    "settings",
    [{}, {"count": 34}, {"run": SCATTER}, {"count": 34, "run": SCATTER}, {"tail": 4}, {"count": 34, "tail": 4},
     {"count": 34, "run": SCATTER, "tail": 4}, {"count": FEWEST_CELLS, "run": SCATTER}, {"repeats": 4, "tail": 4}],
    ids=str,
)  # fmt: skip
def test_where_nothing_differs_one_family_in_twenty_says_so_at_most(settings):
    """Also where two runs differ by more than their repeats, and where tails are heavy."""
    two_errors = 2 * math.sqrt(0.05 * 0.95 / DRAWS)
    assert share_found(np.random.default_rng(20200421), **settings) <= 0.05 + two_errors


@pytest.mark.parametrize(
    ("count", "others", "repeats", "power"), [(16, 0, 2, 0.75), (34, 0, 2, 0.75), (16, 3, 2, 0.5), (16, 3, 4, 0.8)]
)
def test_a_cell_that_is_a_fifth_slower_is_singled_out(count, others, repeats, power):
    """By itself or with three others that are slower too; repeats scatter by 4 %."""
    rng = np.random.default_rng(20200421)
    found = []
    for _ in range(100):
        pairs = cells(rng, count=count, repeats=repeats)
        slower = [(0.8 * new, old) for new, old in pairs[: 1 + others]]
        found.append(adjusted([*slower, *pairs[1 + others :]])[0] <= 0.05)
    assert np.mean(found) >= power


def test_an_interval_holds_the_ratio_in_nineteen_of_twenty():
    rng = np.random.default_rng(20200421)
    held = []
    for _ in range(DRAWS):
        pairs = cells(rng)
        ratio = compare_pooled(*pairs[0], pool_of(pairs)).ratio
        held.append(ratio.low <= 1 <= ratio.high)
    assert np.mean(held) >= 0.94


def test_interval_and_test_agree():
    """Where one test is made, the interval leaves out 1 exactly when p is below 5 %."""
    rng = np.random.default_rng(20200421)
    for _ in range(50):
        pairs = cells(rng, run=0.03)
        pool = pool_of(pairs)
        for new, old in pairs:
            found = compare_pooled(new, old, pool)
            assert (found.p_value < 0.05) == (not found.ratio.low <= 1 <= found.ratio.high)


def test_the_numbers_are_those_of_the_formula():
    """Twelve sides of two repeats, each a factor of e^0.1 apart: variance 0.005 with one degree of freedom each."""
    side = np.exp([0.0, 0.1])
    pool = pool_of([(side, side)] * 6)
    assert (pool.cells, pool.freedom, pool.inflation) == (6, 12, 1.0)
    assert pool.scatter == pytest.approx(math.sqrt(0.005))
    found = compare_pooled(2 * side, side, pool)
    assert found.ratio.median == pytest.approx(2)
    # t(0.975, 5) = 2.5706, standard error sqrt(0.005 (1/2 + 1/2))
    assert math.log(found.ratio.high / 2) == pytest.approx(2.5706 * math.sqrt(0.005), abs=1e-5)
    assert pool.resolution(2, 1) == pytest.approx(math.exp(2.5706 * math.sqrt(0.005)), abs=1e-5)


@pytest.mark.parametrize("pairs", [[([1.0, 1.1], [1.0, 1.2])] * 5, [([1.0], [1.1])] * 9, [([1.0] * 2, [1.0] * 2)] * 9])
def test_too_few_cells_or_repeats_say_nothing(pairs):
    assert pool_of(pairs) is None


def test_a_value_that_is_no_throughput_is_refused():
    with pytest.raises(ValueError, match="pairs must be positive"):
        pool_of([([0.0, 1.0], [1.0, 1.0])] * 6)


def measured():
    """The measured reference rows of the ablation and the sweep."""
    paths = sorted(REFERENCE_FOLDER.glob("measured/*/*.csv"))
    return [row for path in paths if path.stem in ("ablation", "sweep_measured") for row in read_rows(path, ("cell",))]


def test_one_reference_cell_that_is_slower_is_singled_out_and_no_other():
    """By a factor a tenth beyond that which compare says it can tell."""
    rows = [row for row in measured() if row.status == "ok"]
    same = compare_rows(rows, rows)
    assert {cell.verdict for cell in same} <= {"no difference shown", "equal"}
    pool = common_scatter(same)
    counts = {cell.row.cell: len(cell.values) for cell in same}
    slow = next(name for name, count in counts.items() if count == 2)
    factor = 1.1 * pool.resolution(2, len(same))
    changed = [
        replace(row, throughput_samples_per_s=row.throughput_samples_per_s / factor) if row.cell == slow else row
        for row in rows
    ]
    differing = [cell.row.cell for cell in compare_rows(changed, rows) if cell.verdict == "differs"]
    assert differing == [slow]
