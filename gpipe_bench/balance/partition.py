"""Exact min-max partition of a sequence of costs into contiguous blocks.

A pipeline runs at the pace of its slowest partition, so the best balance makes the largest block as small as it can be:

    costs    1  1  1  1  1  1  1  10     n = 3
    blocks  [1  1  1  1][1  1  1][10]    largest 10, and no split does better

The heuristic of torchgpipe, block partitioning by repeated exchange, ends with blocks of 2, 2 and 13 here.
All sums are exact: floating-point costs are binary fractions, so they become integers over one denominator. Rounding
and the order of addition cannot make one split look better than an equal one.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from gpipe_bench.errors import BalanceError
from gpipe_bench.settings import Partitions, checked


def split_min_max(costs: Sequence[float], n: int) -> list[int]:
    """Sizes of n contiguous, non-empty blocks of ``costs`` whose largest sum is as small as it can be.

    Among such splits it takes the one with the smallest sum of squared block sums, so the other blocks are even, too;
    then the one with the smallest sum of squared sizes; then the one with the largest blocks at the front.

    Args:
        costs: one number per layer, finite and not negative, in any unit.
        n: number of blocks.

    Returns:
        n positive integers whose sum is the number of costs.

    Raises:
        BalanceError: a ValueError; ``n`` is less than 1 or more than the number of costs, or a cost is negative or not
            finite.
    """
    check_partitions(n, len(costs))
    prefix = _prefix_sums(costs)
    limit = _smallest_limit(prefix, n)
    cuts = _even_cuts(prefix, n, limit)
    return [end - start for start, end in zip([0, *cuts], [*cuts, len(costs)], strict=True)]


def check_partitions(n: int, layers: int) -> None:
    """Check that ``layers`` can be split into n non-empty blocks.

    Raises:
        BalanceError: they cannot.
    """
    checked("partitions", Partitions, n, BalanceError)
    if n > layers:
        raise BalanceError(
            f"partitions must not exceed the layers, got {n} partitions for {layers} layers; ask for at most {layers}"
        )


def _prefix_sums(costs: Sequence[float]) -> list[int]:
    """Exact sums of the first 0, 1, ... costs, over one common denominator."""
    for layer, cost in enumerate(costs):
        if not (math.isfinite(cost) and cost >= 0):
            raise BalanceError(f"costs must be finite and not negative, got {cost} for layer {layer}; measure it again")
    fractions = [Fraction(cost) for cost in costs]
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    return list(accumulate((int(fraction * denominator) for fraction in fractions), initial=0))


def _smallest_limit(prefix: list[int], n: int) -> int:
    """The smallest possible largest sum, by bisection: a limit holds if n greedy blocks reach the end."""
    layers = len(prefix) - 1
    low = max(-(-prefix[-1] // n), *(after - before for before, after in pairwise(prefix)))
    high = prefix[-1]
    while low < high:
        middle = (low + high) // 2
        if _greedy_ends(prefix, n, middle)[-1] == layers:
            high = middle
        else:
            low = middle + 1
    return low


def _greedy_ends(prefix: list[int], n: int, limit: int) -> list[int]:
    """How many layers 0, 1, ..., n blocks hold at most, from the front, within ``limit`` each."""
    ends = [0]
    for _ in range(n):
        ends.append(bisect_right(prefix, prefix[ends[-1]] + limit) - 1)
    return ends


def _even_cuts(prefix: list[int], n: int, limit: int) -> list[int]:
    """The n - 1 cuts that the tie-break of :func:`split_min_max` wants among all splits within ``limit``.

    Dynamic programming over blocks. Squares of sums satisfy the quadrangle inequality, so the best last cut moves
    only to the right as the end does, and each level takes O(L log L) steps (divide and conquer).
    """
    layers = len(prefix) - 1
    reversed_prefix = [prefix[-1] - value for value in reversed(prefix)]
    from_front = _greedy_ends(prefix, n, limit)
    from_back = _greedy_ends(reversed_prefix, n, limit)
    # Where the j-th cut can be: both sides must fit into their blocks, and no block may be empty.
    cuttable = [range(max(layers - from_back[n - j], j), min(from_front[j], layers - (n - j)) + 1) for j in range(1, n)]
    # Squared sums decide; squared sizes, all together at most layers^2, only where those are equal.
    scale = layers * layers + 1

    def weight(start: int, end: int) -> int:
        return scale * (prefix[end] - prefix[start]) ** 2 + (end - start) ** 2

    def first_start(end: int) -> int:
        return bisect_left(prefix, prefix[end] - limit)

    best = {0: 0}
    choices: list[dict[int, int]] = []
    for ends in [*cuttable, range(layers, layers + 1)]:
        best, choice = _extend(best, ends, weight, first_start)
        choices.append(choice)
    cuts = [layers]
    for choice in reversed(choices):
        cuts.append(choice[cuts[-1]])
    return cuts[-2:0:-1]


def _extend(
    best: dict[int, int],
    ends: range,
    weight: Callable[[int, int], int],
    first_start: Callable[[int], int],
) -> tuple[dict[int, int], dict[int, int]]:
    """One block more: the least weight up to each end, and where its last block starts, as late as possible.

    Args:
        best: least weight of the blocks so far, by where they end; the keys are consecutive.
        ends: where the new block may end.
        weight: of a block, by start and end.
        first_start: the earliest start of a block within the limit, by its end.
    """
    extended: dict[int, int] = {}
    choice: dict[int, int] = {}
    pending = [(ends, min(best), max(best))]
    while pending:
        part, low, high = pending.pop()
        if not part:
            continue
        middle = len(part) // 2
        end = part[middle]
        starts = range(max(low, first_start(end)), min(high, end - 1) + 1)
        extended[end], negated = min((best[start] + weight(start, end), -start) for start in starts)
        choice[end] = -negated
        pending += [(part[:middle], low, -negated), (part[middle + 1 :], -negated, high)]
    return extended, choice
