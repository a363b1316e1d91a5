"""Namespaces tell skips of equal name apart, so a model can use one skippable class many times."""

from __future__ import annotations

import functools
import itertools

_numbers = itertools.count()


@functools.total_ordering
class Namespace:
    """Tells skips of equal name apart: a skip is popped by a layer in the same namespace as the layer that stashes it.

    ::

        inner, outer = Namespace(), Namespace()
        nn.Sequential(
            Enter().isolate(outer), Enter().isolate(inner), Leave().isolate(inner), Leave().isolate(outer)
        )

    Namespaces are hashable, ordered by creation, and equal to their copies: a copied or pickled model keeps its skips.
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
"""Identifies a skip within a model: its namespace, None without one, and its name."""
