"""The exact min-max partition, against every split there is."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.balance import split_min_max
from gpipe_bench.errors import BalanceError

finite = st.floats(min_value=0, max_value=1e6, allow_nan=False)


def loads(costs: Sequence[float], sizes: Sequence[int]) -> list[Fraction]:
    ends = list(itertools.accumulate(sizes))
    return [sum(map(Fraction, costs[end - size : end]), Fraction()) for end, size in zip(ends, sizes, strict=True)]


def brute_force(costs: Sequence[float], n: int) -> list[int]:
    """The split that the documented order of preferences picks among all of them."""

    def preference(sizes: list[int]) -> tuple[Fraction, Fraction, int, list[int]]:
        sums = loads(costs, sizes)
        even = sum((total**2 for total in sums), Fraction())
        return max(sums), even, sum(size**2 for size in sizes), sizes[::-1]

    cuts = itertools.combinations(range(1, len(costs)), n - 1)
    return min(
        ([end - start for start, end in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts), key=preference
    )


@st.composite
def problems(draw: st.DrawFn, costs: st.SearchStrategy[float]) -> tuple[list[float], int]:
    drawn = draw(st.lists(costs, min_size=1, max_size=9))
    return drawn, draw(st.integers(1, len(drawn)))


@given(problems(st.integers(0, 6)))
def test_small_whole_costs_give_the_split_that_brute_force_prefers(problem: tuple[list[float], int]) -> None:
    costs, n = problem

    assert split_min_max(costs, n) == brute_force(costs, n)


@given(problems(finite))
def test_floating_point_costs_give_the_split_that_brute_force_prefers(problem: tuple[list[float], int]) -> None:
    costs, n = problem

    assert split_min_max(costs, n) == brute_force(costs, n)


@given(st.lists(finite, min_size=1, max_size=300), st.data())
def test_many_layers_are_never_split_worse_than_evenly(costs: list[float], data: st.DataObject) -> None:
    n = data.draw(st.integers(1, len(costs)))
    share, rest = divmod(len(costs), n)
    even = [share + 1] * rest + [share] * (n - rest)

    sizes = split_min_max(costs, n)

    assert len(sizes) == n
    assert sum(sizes) == len(costs)
    assert min(sizes) >= 1
    assert max(loads(costs, sizes)) <= max(loads(costs, even))


@pytest.mark.parametrize(
    ("costs", "n", "sizes"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 10], 3, [4, 3, 1]),
        ([1, 2, 3, 4, 5, 6], 2, [4, 2]),
        ([6, 5, 4, 3, 2, 1], 2, [2, 4]),
        # Loads 10, 3, 6 would have the smaller squares, but not the smallest maximum.
        ([2, 8, 3, 6], 3, [1, 1, 2]),
        ([2, 2, 6, 0, 9, 2], 3, [3, 2, 1]),
        ([5, 5], 1, [2]),
        ([1, 1, 1, 1], 3, [2, 1, 1]),
        ([0, 0, 0, 0, 0, 0], 3, [2, 2, 2]),
        ([0.1] * 10, 5, [2, 2, 2, 2, 2]),
    ],
)
def test_splits_worked_out_by_hand(costs: list[float], n: int, sizes: list[int]) -> None:
    assert split_min_max(costs, n) == sizes


def test_as_many_layers_as_the_deepest_published_model_are_split_optimally() -> None:
    generator = random.Random(0)
    costs = [generator.random() ** 8 for _ in range(2133)]

    largest = max(loads(costs, split_min_max(costs, 8)))

    # No split fits below: eight blocks, each as long as a slightly smaller limit allows, end before the last layer.
    blocks, total = 1, Fraction()
    for cost in map(Fraction, costs):
        fits = total + cost < largest
        blocks, total = (blocks, total + cost) if fits else (blocks + 1, cost)
    assert blocks > 8


@pytest.mark.parametrize("n", [0, -1])
def test_partitions_must_be_positive(n: int) -> None:
    with pytest.raises(BalanceError, match=rf"partitions must be a whole number of at least 1, got {n}; use 1 or more"):
        split_min_max([1, 2], n)


def test_partitions_must_not_exceed_the_layers() -> None:
    with pytest.raises(BalanceError, match="got 3 partitions for 2 layers; ask for at most 2"):
        split_min_max([1, 2], 3)


@pytest.mark.parametrize("cost", [-1.0, math.nan, math.inf])
def test_costs_must_be_finite_and_not_negative(cost: float) -> None:
    with pytest.raises(BalanceError, match=f"costs must be finite and not negative, got {cost} for layer 1"):
        split_min_max([1, cost], 1)
