"""Random choices that are the same with every version of Python, which promises that of ``Random.random`` alone."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

__all__ = ["Draw"]

T = TypeVar("T")


class Draw:
    """Choices by a seed."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)

    def number(self, least: int, most: int) -> int:
        """A whole number, both ends included."""
        return least + int(self._random.random() * (most - least + 1))

    def pick(self, values: Sequence[T]) -> T:
        """One of some values; a value that stands there twice is twice as likely."""
        return values[self.number(0, len(values) - 1)]

    def chance(self, share: float) -> bool:
        """True in such a share of the cases."""
        return self._random.random() < share

    def some(self, values: Sequence[T], least: int, most: int) -> list[T]:
        """Between ``least`` and ``most`` values, some of them maybe twice."""
        return [self.pick(values) for _ in range(self.number(least, most))]

    def subset(self, values: Sequence[T]) -> list[T]:
        """Each with a chance of one half, in their order."""
        return [value for value in values if self.chance(0.5)]
