import math
import random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.results.intervals import median_interval, ratio_interval

SAMPLES = st.lists(st.floats(0.1, 1e6), min_size=2, max_size=12)


def test_one_sample_has_a_median_and_no_interval():
    n, median, low, high = median_interval([3.5])
    assert (n, median) == (1, 3.5)
    assert math.isnan(low)
    assert math.isnan(high)


def test_three_samples_span_all_of_them():
    assert median_interval([2.0, 1.0, 4.0]) == (3, 2.0, 1.0, 4.0)


def test_equal_samples_have_an_interval_of_no_width():
    assert median_interval([7.0] * 5) == (5, 7.0, 7.0, 7.0)


@given(SAMPLES, st.randoms())
def test_order_of_samples_changes_nothing(samples, shuffler):
    shuffled = list(samples)
    shuffler.shuffle(shuffled)
    assert median_interval(samples) == median_interval(shuffled)


@given(SAMPLES)
def test_interval_holds_the_median_and_stays_among_the_samples(samples):
    n, median, low, high = median_interval(samples)
    assert n == len(samples)
    assert min(samples) <= low <= median <= high <= max(samples)


def test_width_agrees_with_the_known_error_of_a_median():
    # The standard error of the median of N normal samples is sqrt(pi / 2N) sigma.
    rng = random.Random(5)
    samples = [rng.gauss(100, 1) for _ in range(400)]
    _, _, low, high = median_interval(samples)
    expected = 2 * NormalDist().inv_cdf(0.975) * math.sqrt(math.pi / 800)
    assert high - low == pytest.approx(expected, rel=0.3)


def test_ratio_of_medians_and_its_bounds():
    n, ratio, low, high = ratio_interval([20.0, 22.0, 24.0], [10.0, 11.0, 12.0])
    assert (n, ratio) == (3, 2.0)
    assert low == pytest.approx(20 / 12)
    assert high == pytest.approx(24 / 10)


def test_ratio_to_a_single_sample_has_no_interval():
    n, ratio, low, high = ratio_interval([20.0, 22.0, 24.0], [10.0])
    assert (n, ratio) == (1, 2.2)
    assert math.isnan(low)
    assert math.isnan(high)


@pytest.mark.parametrize("samples", [[], [1.0, math.nan], [math.inf]])
def test_samples_must_be_finite_numbers(samples):
    with pytest.raises(ValueError, match="samples must be one or more finite numbers"):
        median_interval(samples)


@pytest.mark.parametrize("reference", [[0.0, 1.0], [-1.0]])
def test_reference_of_a_ratio_must_be_positive(reference):
    with pytest.raises(ValueError, match="reference must be positive"):
        ratio_interval([1.0, 2.0], reference)
