"""Whether two sets of repeats differ, and by how much.

Medians, ratios and their intervals are those of :mod:`gpipe_bench.results.intervals`, so tables and figures agree.
Whether a difference is real is asked of the Mann-Whitney test: it assumes no distribution, and times are not normal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_bench.results.intervals import Interval, ratio_interval

LEVEL: Final = 0.05
"""The largest p-value that counts as a difference."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One set of repeats against a reference.

    Attributes:
        ratio: median over the reference's median, with its 95 % interval.
        p_value: two-sided, of the Mann-Whitney test that neither side tends to be larger.
        n: repeats on this side.
        n_reference: repeats on the other.
    """

    ratio: Interval
    p_value: float
    n: int
    n_reference: int


def enough_repeats(n: int, n_reference: int, tests: int = 1) -> bool:
    """Whether two sides without any overlap would count as different: alone, from four repeats on each side on.

    Args:
        n: repeats on this side.
        n_reference: repeats on the other.
        tests: how many are made together.
    """
    return tests * 2 / math.comb(n + n_reference, n) <= LEVEL


def differ(samples: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether a difference between two sides is shown."""
    return enough_repeats(len(samples), len(reference)) and compare_samples(samples, reference).p_value <= LEVEL


def repeats_needed(tests: int = 1) -> int:
    """The fewest repeats on each side with which one of ``tests`` comparisons made together can show a difference."""
    return next(n for n in itertools.count(2) if enough_repeats(n, n, tests))


def compare_samples(samples: Sequence[float], reference: Sequence[float]) -> Comparison:
    """Compare repeats of one quantity.

    Args:
        samples: one value per repeat.
        reference: the same quantity on the other side, positive.

    Raises:
        ValueError: a side without values, with one that is not finite, or a reference that is not positive.
    """
    # scipy takes most of a second to load, which a workflow's start and --help would pay.
    from scipy.stats import mannwhitneyu

    ratio = ratio_interval(samples, reference)
    test = mannwhitneyu(samples, reference, alternative="two-sided", method="auto")
    return Comparison(ratio, float(test.pvalue), len(samples), len(reference))
