"""Shapes of results that are plain to see: elementwise, concatenated and normalized contiguous tensors of one type.

PyTorch computes these in Python on the meta device, up to two milliseconds each, and a model asks for hundreds of them;
and for the first product or concatenation it loads its compiler, which takes as long as all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

__all__ = ["Shape", "plain_result"]

_aten: Final = torch.ops.aten
_ELEMENTWISE: Final = frozenset(
    {
        _aten.add.Tensor,
        _aten.div.Tensor,
        _aten.leaky_relu.default,
        _aten.leaky_relu_backward.default,
        _aten.mul.Tensor,
        _aten.relu.default,
        _aten.sigmoid.default,
        _aten.sqrt.default,
        _aten.sub.Tensor,
        _aten.threshold_backward.default,
    }
)
_Number = bool | int | float
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
    if func is _aten.cat.default:
        return _together(*args)
    if func is _aten.binary_cross_entropy_with_logits.default:
        return _entropy(*args)
    if func is _aten.native_batch_norm.default:
        x, *others, training = args[:6]
        same = _of_channels(x, others)
        return (_of(x), same, same) if training and same else None
    if func is _aten.native_batch_norm_backward.default:
        grad, x, *others, training, _, mask = args
        same = _of_channels(x, others)
        ordered = grad.dtype == x.dtype and grad.shape == x.shape and _in_order(grad)
        plain = training and same and ordered and all(isinstance(value, Tensor) for value in others[-2:])
        return (_of(x), *(same if wanted else None for wanted in mask[1:])) if plain else None
    return None


def _elementwise(args: Sequence[Any]) -> Shape | None:
    """Of tensors of one shape, maybe parts of others, or that repeat themselves to come to it."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    if not all(isinstance(value, Tensor | _Number) for value in args):
        return None
    # None is among the shapes where a tensor is not contiguous.
    found = {_of(value) for value in tensors}
    if None in found:
        found = {_of_part(value) for value in tensors}
        return found.pop() if len(found) == 1 else None
    return next((shape for shape in found if all(_spreads(other, shape) for other in found)), None)


def _spreads(shape: Shape | None, whole: Shape | None) -> bool:
    """Whether a tensor has the shape of the whole, or takes it by repeating itself, as a number without axes does."""
    if shape is None or whole is None or shape.dtype != whole.dtype:
        return False
    if not shape.shape:
        return True
    if len(shape.shape) != len(whole.shape):
        return False
    return all(length in {1, full} for length, full in zip(shape.shape, whole.shape, strict=True))


def _together(tensors: Sequence[Tensor], dim: int = 0) -> Shape | None:
    """Of tensors one after the other along a dimension."""
    found = [_of(tensor) for tensor in tensors]
    others = {shape and (*shape.shape[:dim], *shape.shape[dim:][1:], len(shape.shape), shape.dtype) for shape in found}
    first = found[0] if len(others) == 1 else None
    if first is None or not -len(first.shape) <= dim < len(first.shape):
        return None
    whole = [*first.shape]
    whole[dim] = sum(shape.shape[dim] for shape in found if shape is not None)
    return Shape(tuple(whole), _contiguous(whole), first.dtype)


def _entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, positive: Tensor | None = None, reduction: int = 1
) -> Shape | None:
    """Of binary cross-entropy without weights: a number for all elements, or one for each."""
    whole = _of(x)
    if whole is None or whole != _of(target) or weight is not None or positive is not None:
        return None
    return Shape((), (), whole.dtype) if reduction else whole


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
    inner = zip(tensor.stride(), tensor.shape, strict=True)
    return all(step >= own * length > 0 for step, (own, length) in zip(tensor.stride(), [*inner][1:], strict=False))


def _of(tensor: Tensor) -> Shape | None:
    """The shape of a contiguous tensor of single or double precision; None for others."""
    shape = tuple(tensor.shape)
    stride = _contiguous(shape)
    return Shape(shape, stride, tensor.dtype) if tensor.stride() == stride and tensor.dtype in _PRECISE else None


def _of_part(tensor: Tensor) -> Shape | None:
    """The shape of a tensor, as if it were contiguous, whose dimensions are in one order only; None for others."""
    shape = tuple(tensor.shape)
    plain = tensor.dtype in _PRECISE and min(shape, default=0) > 1 and _in_order(tensor)
    return Shape(shape, _contiguous(shape), tensor.dtype) if plain else None


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    found, step = [], 1
    for length in reversed(shape):
        found.append(step)
        step *= max(length, 1)
    return tuple(reversed(found))
