"""Shapley values: what each component contributes to a gain, whatever the order in which components are added.

What a component brings depends on which others are on already: copy streams bring little where nothing is ordered.
Adding components one after the other gives each its share for that one order. The Shapley value (L. S. Shapley, "A
value for n-person games", 1953) is the mean over all orders:

    share(p) = sum over sets S without p of  |S|! (n - |S| - 1)! / n!  x  (v(S + p) - v(S))

Shares add up to v(all) - v(none), components that do the same get the same, and one that never changes anything gets
nothing; no other division does all that and is additive in v.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial, fsum


@dataclass(frozen=True, slots=True)
class Share:
    """What one player contributes.

    Attributes:
        value: its Shapley value, in the unit of the game's values.
        low: the least that it brought to any set of other players.
        high: the most.
    """

    value: float
    low: float
    high: float


def shapley_shares(players: Sequence[str], value: Callable[[frozenset[str]], float]) -> dict[str, Share]:
    """The share of each player in ``value(all) - value(none)``.

    Args:
        players: names, each once; 2^n values are asked for.
        value: of a set of players; called once per set.

    Raises:
        ValueError: a name occurs twice.
    """
    if len(set(players)) != len(players):
        raise ValueError(f"players must be given once each, got {list(players)}; leave doubles out")
    count = len(players)
    sets = [frozenset(chosen) for size in range(count + 1) for chosen in combinations(players, size)]
    values = {chosen: value(chosen) for chosen in sets}
    shares = {}
    for player in players:
        # fsum rounds once, so the result does not depend on the order of the sets.
        without = [chosen for chosen in sets if player not in chosen]
        gains = [values[chosen | {player}] - values[chosen] for chosen in without]
        weights = [factorial(len(chosen)) * factorial(count - len(chosen) - 1) for chosen in without]
        mean = fsum(weight * gain for weight, gain in zip(weights, gains, strict=True)) / factorial(count)
        shares[player] = Share(mean, min(gains), max(gains))
    return shares
