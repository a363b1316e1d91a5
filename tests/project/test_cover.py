"""Few cases of a product hold every pair of its values."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.cover import EVERY_CASE, cover


def pairs(cases):
    return {pair for case in cases for pair in combinations(enumerate(case), 2)}


def test_every_pair_is_in_the_chosen_cases():
    cases = [*product("abc", "xyz", (True, False), (True, False))]
    chosen = cover(cases)
    assert pairs(chosen) == pairs(cases)
    assert len(chosen) == (len(cases) if EVERY_CASE else 9)


@pytest.mark.parametrize("third", [1, 2])
@pytest.mark.parametrize(("second", "same"), [("x", 0), ("y", 0), ("z", 0)])
@pytest.mark.parametrize("first", [[], [0], [1]])  # not hashable
def test_a_product_of_three(request, first, second, same, third):
    """The cases of this test itself, all or few of them."""
    items = [item for item in request.session.items if item.originalname == request.node.originalname]
    values = [(id(p["first"]), p["second"], p["third"]) for p in (item.callspec.params for item in items)]
    if len(values) > 1:  # one alone if it was asked for
        assert len(pairs(values)) == 9 + 6 + 6
    assert len(values) in {1, 18 if EVERY_CASE else 9}
