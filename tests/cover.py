"""Few of many combinations, a covering array: every pair of values that occurs in all of them occurs in the few."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import Any, Final

__all__ = ["EVERY_CASE", "cover"]

EVERY_CASE: Final = bool(os.environ.get("EVERY_CASE"))
"""Whether all combinations run, and the tests that are marked as slow."""


def cover(cases: Iterable[Any], values: Callable[[Any], Iterable[Hashable]] = tuple, together: int = 2) -> list[Any]:
    """Few of ``cases``: the one with most new combinations of ``together`` values, until there is no new one.

    All of them with :data:`EVERY_CASE`.

    Args:
        cases: tuples, or anything of which ``values`` gives the values.
        values: the values of a case, in the same order for each.
        together: 2 for every pair of values, 3 for every triple.
    """
    if EVERY_CASE:
        return [*cases]
    held = [(case, set(combinations(enumerate(values(case)), together))) for case in cases]
    left = set().union(*(found for _, found in held))
    chosen = []
    while left:
        case, found = max(held, key=lambda one: len(one[1] & left))
        left -= found
        chosen.append(case)
    return chosen
