"""Namespaces keep skips of equal name apart, so that one skippable class can be used many times in a model."""

from __future__ import annotations

import functools
import itertools

__all__ = ["Namespace", "SkipKey"]

_numbers = itertools.count()


@functools.total_ordering
class Namespace:
    """A name space for skips: hashable, ordered by creation, and equal to its copies.

    Copying a module (``copy.deepcopy``, pickling) keeps its namespaces equal, so a copied model still finds its skips.
    """

    __slots__ = ("_number",)

    def __init__(self) -> None:
        self._number = next(_numbers)

    def __repr__(self) -> str:
        return f"<Namespace {self._number}>"

    def __hash__(self) -> int:
        return hash((Namespace, self._number))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self._number == other._number

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, Namespace):
            return NotImplemented
        return self._number < other._number


SkipKey = tuple[Namespace | None, str]
"""What identifies a skip within a model: its namespace (None is the common one) and its name."""
