"""Medians, ratios of medians and medians of ratios with their 95 % intervals, the same for tables and figures.

The interval is the percentile bootstrap over repeats with a fixed seed, so the same samples always give the same
numbers, in any order. With five samples or fewer it spans all of them, and its true coverage is below 95 %: no
interval without a model of the noise can do better. BCa was refused because it is undefined where samples tie.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

_SEED: Final = 20200421
_RESAMPLES: Final = 9999
_PERCENTILES: Final = (2.5, 97.5)

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
