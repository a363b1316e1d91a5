"""Shapes of results that are plain to see: of elementwise operations and batch norms.

PyTorch computes these in Python on the meta device, in up to two milliseconds each, and they are most of the operations
of a convolutional model. What is known here is the case of contiguous tensors of one shape and one precise type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["Shape", "plain_result"]

_aten: Final = torch.ops.aten
_PRECISE: Final = (torch.float32, torch.float64)
_ELEMENTWISE: Final = frozenset(
    {
        _aten.add.Tensor,
        _aten.leaky_relu.default,
        _aten.leaky_relu_backward.default,
        _aten.mul.Tensor,
        _aten.relu.default,
        _aten.threshold_backward.default,
    }
)
_Number = bool | int | float


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


def plain_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Shape | tuple[Shape | None, ...] | None:
    """What an operation gives, with shapes in the place of tensors; None where that is not plain to see.

    Args:
        func: the aten overload.
        args: what it is called with.
        kwargs: likewise.
    """
    if kwargs:
        return None
    if func in _ELEMENTWISE:
        return _common(args)
    if func is _aten.native_batch_norm.default:
        x, *others, training, _, _ = args
        whole, same = _of(x), _of_channels(x, others)
        return (whole, same, same) if training and whole and same else None
    if func is _aten.native_batch_norm_backward.default:
        grad, x, *others, training, _, mask = args
        whole, same = _common([grad, x]), _of_channels(x, others)
        plain = training and whole and same and all(isinstance(value, Tensor) for value in others[-2:])
        return (whole, *(same if wanted else None for wanted in mask[1:])) if plain else None
    return None


def _common(args: Sequence[Any]) -> Shape | None:
    """The shape of all tensors among numbers and tensors on the meta device."""
    if not all(isinstance(value, Tensor | _Number) for value in args):
        return None
    found = {_of(value) for value in args if isinstance(value, Tensor)}
    return found.pop() if len(found) == 1 else None


def _of_channels(x: Tensor, others: Sequence[Tensor | None]) -> Shape | None:
    """The shape of a number for each channel of x, if the others, as far as there are any, have it."""
    whole = _of(x)
    # Of a single value there is no variance.
    if whole is None or len(whole.shape) < 2 or x.numel() <= whole.shape[1]:
        return None
    expected = Shape(whole.shape[1:2], (1,), whole.dtype)
    return expected if all(value is None or _of(value) == expected for value in others) else None


def _of(tensor: Tensor) -> Shape | None:
    """The shape of a contiguous tensor of single or double precision on the meta device; None for others."""
    if not (tensor.is_meta and tensor.layout is torch.strided and tensor.dtype in _PRECISE and tensor.is_contiguous()):
        return None
    shape, steps, step = tuple(tensor.shape), list[int](), 1
    for length in reversed(shape):
        steps.append(step)
        step *= max(length, 1)
    strides = tuple(reversed(steps))
    return Shape(shape, strides, tensor.dtype) if tensor.stride() == strides else None
