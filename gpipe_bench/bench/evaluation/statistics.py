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

import numpy as np
import numpy.typing as npt

from gpipe_bench.results.intervals import Interval, ratio_interval

_LEVEL: Final = 0.05
_DRAWS: Final = 9999
_SEED: Final = 20200421
_ROUNDING: Final = 1e-12

Array = npt.NDArray[np.float64]


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

    @property
    def verdict(self) -> str:
        """``differs``, ``no difference shown``, or ``too few repeats`` where no data could show one."""
        if not enough_repeats(self.n, self.n_reference):
            return "too few repeats"
        return "differs" if self.p_value <= _LEVEL else "no difference shown"


@dataclass(frozen=True, slots=True)
class Shift:
    """Whether one result set as a whole lies above or below another.

    Attributes:
        cells: cells that both sets have values of.
        ratio: geometric mean over the cells of the ratio of medians, with its 95 % interval.
        p_value: two-sided, of the permutation test within cells that the sets are not shifted.
    """

    cells: int
    ratio: Interval
    p_value: float


def enough_repeats(n: int, n_reference: int, tests: int = 1) -> bool:
    """Whether two sides without any overlap would count as different: alone, from four repeats on each side on.

    Args:
        n: repeats on this side.
        n_reference: repeats on the other.
        tests: how many are made together.
    """
    return tests * 2 / math.comb(n + n_reference, n) <= _LEVEL


def differ(samples: Sequence[float], reference: Sequence[float]) -> bool:
    """Whether a difference between two sides is shown."""
    return enough_repeats(len(samples), len(reference)) and compare_samples(samples, reference).verdict == "differs"


def repeats_needed(tests: int = 1) -> int:
    """The fewest repeats on each side with which one of ``tests`` comparisons made together can show a difference."""
    return next(n for n in itertools.count(2) if enough_repeats(n, n, tests))


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for having made all of these tests (Holm 1979, step-down), in the order given."""
    adjusted = [1.0] * len(p_values)
    highest = 0.0
    for rank, position in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[position]))
        adjusted[position] = highest
    return adjusted


def shift(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Shift:
    """Whether the first sides of ``pairs`` lie above or below the second ones, on the whole.

    Args:
        pairs: for each cell the repeats of both sides, all positive.

    Raises:
        ValueError: no pairs, or a side that is empty or not positive.
    """
    if not pairs or not all(len(side) and min(side) > 0 for pair in pairs for side in pair):
        raise ValueError(f"pairs must be positive values on both sides, got {list(pairs)}; leave out failed repeats")
    logs = [(np.log(np.sort(new)), np.log(np.sort(old))) for new, old in pairs]
    observed = float(np.mean([np.median(new) - np.median(old) for new, old in logs]))
    rng = np.random.default_rng(_SEED)
    resampled = np.mean([_resampled(new, rng) - _resampled(old, rng) for new, old in logs], axis=0)
    permuted = np.mean([_permuted(new, old, rng) for new, old in logs], axis=0)
    extreme = int(np.count_nonzero(np.abs(permuted) >= abs(observed) * (1 - _ROUNDING)))
    n = min(min(len(new), len(old)) for new, old in logs)
    low, high = np.exp(np.percentile(resampled, (2.5, 97.5))) if n > 1 else (math.nan, math.nan)
    return Shift(len(pairs), Interval(n, math.exp(observed), float(low), float(high)), (extreme + 1) / (_DRAWS + 1))


def _resampled(values: Array, rng: np.random.Generator) -> Array:
    return np.asarray(np.median(rng.choice(values, (_DRAWS, len(values))), axis=1), dtype=np.float64)


def _permuted(new: Array, old: Array, rng: np.random.Generator) -> Array:
    """Differences of medians where repeats are dealt to the two sides at random."""
    dealt = rng.permuted(np.tile(np.concatenate([new, old]), (_DRAWS, 1)), axis=1)
    return np.asarray(np.median(dealt[:, : len(new)], axis=1) - np.median(dealt[:, len(new) :], axis=1))


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
