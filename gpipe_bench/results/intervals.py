"""Medians and ratios with their 95 % intervals, and whether two sets of repeats differ; for tables and figures alike.

The interval is the percentile bootstrap over repeats with a fixed seed, so the same samples always give the same
numbers, in any order. With five samples or fewer it spans all of them, and its true coverage is below 95 %: no
interval without a model of the noise can do better. BCa was refused because it is undefined where samples tie.

Whether a difference is real is asked of the Mann-Whitney test: it assumes no distribution, and times are not normal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_SEED: Final = 20200421
_RESAMPLES: Final = 9999
_PERCENTILES: Final = (2.5, 97.5)

LEVEL: Final = 0.05
"""The largest p-value that counts as a difference."""


Array = npt.NDArray[np.float64]


class Interval(NamedTuple):
    """A median, or a ratio of medians, with the bounds of its 95 % interval.

    Attributes:
        n: samples behind it; for a ratio those of the smaller side.
        median: the estimate.
        low: lower bound; NaN when ``n`` is 1.
        high: upper bound; NaN when ``n`` is 1.
    """

    n: int
    median: float
    low: float
    high: float


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


def median_interval(samples: Sequence[float]) -> Interval:
    """The median of ``samples`` and its 95 % interval, in their unit.

    Raises:
        ValueError: no samples, or one that is not a finite number.
    """
    data = _checked("samples", samples)
    median = float(np.median(data))
    if len(data) == 1:
        return Interval(1, median, math.nan, math.nan)
    medians = _resampled_medians(data, np.random.default_rng(_SEED))
    return _interval(len(data), median, medians)


def ratio_interval(samples: Sequence[float], reference: Sequence[float]) -> Interval:
    """The median of ``samples`` over the median of ``reference``, both resampled on their own.

    Raises:
        ValueError: no samples on a side, one that is not a finite number, or a reference that is not positive.
    """
    data, base = _checked("samples", samples), _checked("reference", reference)
    if base[0] <= 0:
        raise ValueError(f"reference must be positive, got {base[0]}; pass throughputs, times or bytes")
    n = min(len(data), len(base))
    ratio = float(np.median(data) / np.median(base))
    if n == 1:
        return Interval(1, ratio, math.nan, math.nan)
    rng = np.random.default_rng(_SEED)
    ratios = _resampled_medians(data, rng) / _resampled_medians(base, rng)
    return _interval(n, ratio, ratios)


def paired_ratios(samples: Mapping[int, float], reference: Mapping[int, float]) -> list[float]:
    """The ratios of values that were taken side by side.

    Args:
        samples: the dividends by the number of their round.
        reference: the divisors by the number of their round, all positive.
    """
    return [value / reference[number] for number, value in sorted(samples.items()) if number in reference]


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


def _checked(name: str, samples: Sequence[float]) -> Array:
    data = np.sort(np.asarray(samples, dtype=np.float64))
    if data.ndim != 1 or not len(data) or not np.isfinite(data).all():
        raise ValueError(f"{name} must be one or more finite numbers, got {list(samples)}; leave out failed repeats")
    return data


def _resampled_medians(data: Array, rng: np.random.Generator) -> Array:
    picks = rng.integers(len(data), size=(_RESAMPLES, len(data)))
    return np.asarray(np.median(data[picks], axis=1), dtype=np.float64)


def _interval(n: int, estimate: float, resampled: Array) -> Interval:
    low, high = np.percentile(resampled, _PERCENTILES)
    return Interval(n, estimate, float(low), float(high))
