"""Shapes of results that are plain to see: elementwise operations and batch norm on contiguous tensors of one type.

PyTorch computes these in Python on the meta device, up to two milliseconds each, and a model asks for hundreds of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["Shape", "plain_result"]

_aten: Final = torch.ops.aten
_ELEMENTWISE: Final = frozenset(
    {
        _aten.add.Tensor,
        _aten.leaky_relu.default,
        _aten.leaky_relu_backward.default,
        _aten.relu.default,
        _aten.threshold_backward.default,
    }
)
_NUMBERS: Final = (bool, int, float)
# Types that batch norm keeps its statistics in; those of a half are of another type.
_PRECISE: Final = (torch.float32, torch.float64)


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


def plain_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation gives, with shapes in the place of tensors; None where that is not plain to see.

    Args:
        func: the aten overload.
        args: what it is called with.
        kwargs: likewise.
    """
    if kwargs:
        return None
    if func in _ELEMENTWISE:
        return _elementwise(args)
    if func is _aten.native_batch_norm.default:
        x, *others, training = args[:6]
        same = _of_channels(x, others)
        return (_of(x), same, same) if training and same else None
    if func is _aten.native_batch_norm_backward.default:
        grad, x, *others, training, _, mask = args
        same = _of_channels(x, others)
        ordered = grad.dtype == x.dtype and grad.shape == x.shape and _in_order(grad)
        plain = training and same and ordered and all(mask) and all(isinstance(value, Tensor) for value in others[-2:])
        return (_of(x), same, same) if plain else None
    return None


def _elementwise(args: Sequence[Any]) -> Shape | None:
    # One shape for all, which is None where one of them is not contiguous.
    found = {_of(value) for value in args if isinstance(value, Tensor)}
    others = [value for value in args if not isinstance(value, Tensor)]
    return found.pop() if len(found) == 1 and all(isinstance(value, _NUMBERS) for value in others) else None


def _of_channels(x: Tensor, others: Sequence[Tensor | None]) -> Shape | None:
    """The shape of a number for each channel of x, if the others, as far as there are any, have it."""
    whole = _of(x)
    # Of a single value there is no variance.
    if whole is None or len(whole.shape) < 2 or x.numel() <= whole.shape[1]:
        return None
    expected = Shape(whole.shape[1:2], (1,), whole.dtype)
    return expected if all(value is None or _of(value) == expected for value in others) else None


def _in_order(tensor: Tensor) -> bool:
    """Whether the last dimension is the innermost in memory, and so on, as in a part of a contiguous tensor."""
    strides = tensor.stride()
    return all(outer >= inner > 0 for outer, inner in pairwise(strides))


def _of(tensor: Tensor) -> Shape | None:
    """The shape of a contiguous tensor of single or double precision; None for others."""
    shape = tuple(tensor.shape)
    expected, step = [], 1
    for length in reversed(shape):
        expected.append(step)
        step *= max(length, 1)
    stride = tuple(reversed(expected))
    return Shape(shape, stride, tensor.dtype) if tensor.stride() == stride and tensor.dtype in _PRECISE else None
