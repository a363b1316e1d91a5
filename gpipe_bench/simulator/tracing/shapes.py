"""Shapes of tensors: lengths, steps in memory and type, as far as they are plain."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["PRECISE", "Shape", "contiguous", "in_order", "of", "of_part"]

PRECISE: Final = (torch.float32, torch.float64)
"""Types that batch norm keeps its statistics in; those of a half are of another type."""


class Shape(NamedTuple):
    """A result without its values.

    Attributes:
        shape: lengths.
        stride: elements from one to the next, for each dimension.
        dtype: type of an element.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


def in_order(tensor: Tensor) -> bool:
    """Whether the last dimension is the innermost in memory, and so on, as in a part of a contiguous tensor."""
    return _outer_first([*zip(tensor.stride(), tensor.shape, strict=True)])


def _outer_first(steps: Sequence[tuple[int, int]]) -> bool:
    """Whether each step, of a dimension of a length, reaches beyond all of the next dimension."""
    return all(step >= own * length > 0 for (step, _), (own, length) in pairwise(steps))


def of(tensor: Tensor) -> Shape | None:
    """The shape of a contiguous tensor of single or double precision; None for others."""
    shape = tuple(tensor.shape)
    stride = contiguous(shape)
    return Shape(shape, stride, tensor.dtype) if tensor.stride() == stride and tensor.dtype in PRECISE else None


def of_part(tensor: Tensor) -> Shape | None:
    """The shape of a tensor, as if it were contiguous, whose dimensions are in one order only; None for others.

    Those along which it repeats itself fit in anywhere.
    """
    shape = tuple(tensor.shape)
    # Which of two axes is the inner one, their steps tell, unless there is a single step.
    several = shape and shape[0] and min(shape[1:], default=2) > 1
    steps = [(step, length) for step, length in zip(tensor.stride(), shape, strict=True) if step]
    plain = tensor.dtype in PRECISE and several and _outer_first(steps)
    return Shape(shape, contiguous(shape), tensor.dtype) if plain else None


def contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    found, step = [], 1
    for length in reversed(shape):
        found.append(step)
        step *= max(length, 1)
    return tuple(reversed(found))
