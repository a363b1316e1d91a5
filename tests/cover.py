"""A few of many combinations: whatever two of their values are found in one of all are found in one of the few."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from itertools import combinations
from typing import Any

__all__ = ["cover"]


def cover(cases: Iterable[Any], values: Callable[[Any], Iterable[Hashable]] = tuple, together: int = 2) -> list[Any]:
    """Take the case with most new combinations of ``together`` values until there is no new one."""
    held = [(case, set(combinations(enumerate(values(case)), together))) for case in cases]
    left = set().union(*(found for _, found in held))
    chosen = []
    while left:
        case, found = max(held, key=lambda one: len(one[1] & left))
        left -= found
        chosen.append(case)
    return chosen
