"""Whether one cell among many differs, from few repeats of each: by the scatter that all cells share.

Two repeats of one cell hardly say how much it scatters; two repeats of each of twenty cells say it well. Everything is
on the scale of logarithms, where a difference is a ratio, and rests on this:

    repeats     of every cell scatter by about the same factor, whatever its speed
    runs        differ by more than repeats of one run do, since the machine is never twice the same; how much more is
                seen from the differences of all cells, of which at least half must be alike (a robust factor that
                widens every interval, as in genomic control: Devlin and Roeder 1999)
    tails       are heavier than normal ones: Student's t has at most ten degrees of freedom

That a whole run was slower, for the machine or for the code, no number of cells can tell apart: where all cells are
shifted alike, each of them differs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from gpipe_bench.bench.evaluation.statistics import Comparison
from gpipe_bench.results.intervals import Interval

FEWEST_CELLS: Final = 6
"""With fewer, the scatter between runs cannot be seen."""

_LEVEL: Final = 0.05
_MOST_FREEDOM: Final = 10
_NORMAL: Final = 1.4826
"""A median absolute deviation in standard deviations of the normal distribution."""

Pair = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Pool:
    """What the cells of two result sets say together of how they scatter.

    Attributes:
        cells: how many.
        scatter: standard deviation of the logarithm of one repeat, within its cell and set.
        freedom: degrees of freedom of that.
        inflation: by how much cells differ between the sets beyond what repeats suggest; at least 1.
    """

    cells: int
    scatter: float
    freedom: int
    inflation: float

    def error(self, n: int, n_reference: int) -> float:
        """Standard error of the logarithm of a ratio, for so many repeats on each side."""
        return self.scatter * self.inflation * math.sqrt(1 / n + 1 / n_reference)

    def critical(self, tests: int = 1) -> float:
        """How many standard errors are a difference, at 5 % for so many tests together."""
        from scipy.special import stdtrit

        return -float(stdtrit(self._freedom, _LEVEL / 2 / tests))

    def p_value(self, errors: float) -> float:
        """Two-sided, of a difference of so many standard errors."""
        from scipy.special import stdtr

        return 2 * float(stdtr(self._freedom, -abs(errors)))

    def resolution(self, n: int, tests: int) -> float:
        """The factor from which on one of so many cells differs, with ``n`` repeats on each side."""
        return math.exp(self.critical(tests) * self.error(n, n))

    @property
    def _freedom(self) -> int:
        return min(self.freedom, self.cells - 1, _MOST_FREEDOM)


def pool_of(pairs: Sequence[Pair]) -> Pool | None:
    """The scatter of the cells of two sets; None where there are too few cells or repeats to see it.

    Args:
        pairs: for each cell the repeats of the new and of the old set, all positive.

    Raises:
        ValueError: a side without values, or with one that is not positive.
    """
    if not all(len(side) and min(side) > 0 for pair in pairs for side in pair):
        raise ValueError(f"pairs must be positive values on both sides, got {list(pairs)}; leave out failed repeats")
    sides = [np.log(side) for pair in pairs for side in pair]
    freedom = sum(len(side) - 1 for side in sides)
    # Of values that are all the same, rounding is no scatter.
    squares = sum(float(np.square(side - side.mean()).sum()) for side in sides if np.ptp(side) > 0)
    if len(pairs) < FEWEST_CELLS or freedom < FEWEST_CELLS or not squares:
        return None
    scatter = math.sqrt(squares / freedom)
    errors = [scatter * math.sqrt(sum(1 / len(side) for side in pair)) for pair in pairs]
    units = np.array([_log_ratio(pair) for pair in pairs]) / np.array(errors)
    spread = _NORMAL * float(np.median(np.abs(units - np.median(units))))
    return Pool(len(pairs), scatter, freedom, max(1.0, spread))


def compare_pooled(new: Sequence[float], old: Sequence[float], pool: Pool) -> Comparison:
    """Compare the repeats of one cell: ratio of geometric means, its 95 % interval, and the p-value of equality.

    Args:
        new: one value per repeat, positive.
        old: the same of the other set.
        pool: of all cells of both sets.
    """
    middle, error = _log_ratio((new, old)), pool.error(len(new), len(old))
    half = pool.critical() * error
    ends = (math.exp(value) for value in (middle, middle - half, middle + half))
    ratio = Interval(min(len(new), len(old)), *ends)
    return Comparison(ratio, pool.p_value(middle / error), len(new), len(old))


def _log_ratio(pair: Pair) -> float:
    new, old = (float(np.log(side).mean()) for side in pair)
    return new - old
