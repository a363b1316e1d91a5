"""Shapley values: the properties that define them, and games whose values are known."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpipe_bench.results.shapley import Share, shapley_shares

PLAYERS = ("a", "b", "c", "d")
SETS = [frozenset(name for k, name in enumerate(PLAYERS) if number >> k & 1) for number in range(16)]
GAMES = st.lists(st.floats(-1e3, 1e3), min_size=16, max_size=16).map(
    lambda values: dict(zip(SETS, values, strict=True))
)


@given(GAMES)
def test_shares_add_up_to_the_total_gain(game):
    shares = shapley_shares(PLAYERS, game.__getitem__)
    total = game[frozenset(PLAYERS)] - game[frozenset()]
    assert sum(share.value for share in shares.values()) == pytest.approx(total, abs=1e-9)


@given(GAMES)
def test_a_share_is_the_mean_over_all_orders(game):
    orders = list(permutations(PLAYERS))
    gains = dict.fromkeys(PLAYERS, 0.0)
    for order in orders:
        for k, player in enumerate(order):
            gains[player] += game[frozenset(order[: k + 1])] - game[frozenset(order[:k])]
    for player, share in shapley_shares(PLAYERS, game.__getitem__).items():
        assert share.value == pytest.approx(gains[player] / len(orders), abs=1e-9)


@given(GAMES)
def test_players_that_do_the_same_get_the_same(game):
    def alike(players):
        """``a`` and ``b`` count as one another."""
        return game[frozenset("b" if player == "a" and "b" not in players else player for player in players)]

    shares = shapley_shares(PLAYERS, alike)
    assert shares["a"] == shares["b"]


@given(GAMES)
def test_a_player_that_changes_nothing_gets_nothing(game):
    shares = shapley_shares(PLAYERS, lambda players: game[players - {"c"}])
    assert shares["c"] == Share(0, 0, 0)


@given(GAMES)
def test_the_order_of_the_players_does_not_matter(game):
    forward, backward = (shapley_shares(players, game.__getitem__) for players in (PLAYERS, PLAYERS[::-1]))
    assert forward == backward


@given(GAMES)
def test_a_share_lies_between_the_least_and_the_most(game):
    for share in shapley_shares(PLAYERS, game.__getitem__).values():
        assert share.low - 1e-9 <= share.value <= share.high + 1e-9


def test_two_gloves_make_a_pair():
    """One left glove and two right ones: the left one is worth four times a right one."""
    pairs = {True: 1.0, False: 0.0}
    shares = shapley_shares(("left", "right", "other"), lambda held: pairs["left" in held and len(held) > 1])
    assert shares == {"left": Share(2 / 3, 0, 1), "right": Share(1 / 6, 0, 1), "other": Share(1 / 6, 0, 1)}


def test_a_lone_player_gets_everything():
    assert shapley_shares(("a",), lambda players: 5.0 if players else 2.0) == {"a": Share(3, 3, 3)}


def test_a_player_twice_is_refused():
    with pytest.raises(ValueError, match=r"players must be given once each, got \['a', 'a'\]"):
        shapley_shares(("a", "a"), len)
