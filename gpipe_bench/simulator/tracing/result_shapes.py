"""Shapes of results that are plain to see: of elementwise operations, products, convolutions, batch norms and the like.

PyTorch computes these in Python on the meta device, up to two milliseconds each, and a model asks for hundreds of them;
and for the first product, convolution or concatenation it loads its compiler, which takes longer than all of them.
Said is what contiguous tensors of one type give; PyTorch is asked about all others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor

from gpipe_bench.simulator.tracing.shapes import PRECISE, Shape, contiguous, in_order, of, of_part
from gpipe_bench.simulator.tracing.window_shapes import (
    convolved,
    convolved_back,
    pooled,
    pooled_and_places,
    pooled_back,
    pooled_places_back,
    upsampled,
    upsampled_back,
)

__all__ = ["gives_first", "plain_result"]

_aten: Final = torch.ops.aten
_ELEMENTWISE: Final = frozenset(
    {
        _aten.add.Tensor,
        _aten.div.Scalar,
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
_ALIKE: Final = frozenset({_aten.empty_like.default, _aten.ones_like.default, _aten.zeros_like.default})
_WRITING: Final = frozenset(
    {
        _aten.add_.Tensor,
        _aten.addcdiv_.default,
        _aten.addcmul_.default,
        _aten.div_.Scalar,
        _aten.mul_.Tensor,
        _aten.sub_.Tensor,
    }
)
_Number = bool | int | float


def plain_result(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What an operation gives, with shapes in the place of tensors; None where that is not plain to see.

    Args:
        func: the aten overload.
        args: what it is called with.
        kwargs: likewise.
    """
    if func in _ALIKE and kwargs.keys() <= {"memory_format", "pin_memory"}:
        return of(*args) if kwargs.get("memory_format") in {None, torch.preserve_format} else None
    if kwargs:
        return None
    if func in _ELEMENTWISE:
        return _elementwise(args)
    rule = _rules().get(func)
    return None if rule is None else rule(*args)


@cache
def _rules() -> Mapping[Any, Callable[..., Any]]:
    """Operations, and what says their results from positional arguments."""
    return {
        _aten.addmm.default: _product_and_vector,
        _aten.avg_pool2d.default: pooled,
        _aten.avg_pool2d_backward.default: pooled_back,
        _aten.binary_cross_entropy_with_logits.default: _entropy,
        _aten.cat.default: _together,
        _aten.convolution.default: convolved,
        _aten.convolution_backward.default: convolved_back,
        _aten.max_pool2d_with_indices.default: pooled_and_places,
        _aten.max_pool2d_with_indices_backward.default: pooled_places_back,
        _aten.mean.dim: _reduced,
        _aten.mm.default: _product,
        _aten.native_batch_norm.default: _normalized,
        _aten.native_batch_norm_backward.default: _normalized_back,
        _aten.nll_loss_backward.default: _likelihood_back,
        _aten.nll_loss_forward.default: _likelihood,
        _aten.slice_backward.default: _sliced_back,
        _aten.sum.dim_IntList: _reduced,
        _aten.upsample_nearest2d.default: upsampled,
        _aten.upsample_nearest2d_backward.default: upsampled_back,
        _aten._log_softmax.default: _log_softmax,  # noqa: SLF001 - its name
        _aten._log_softmax_backward_data.default: _log_softmax_back,  # noqa: SLF001 - likewise
    }


def gives_first(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation writes to its first operand and gives that back, and it is plain to see that it can."""
    if func not in _WRITING or not all(isinstance(value, _Number) for value in kwargs.values()):
        return False
    if any(isinstance(value, Tensor) and not (value.is_meta and value.layout is torch.strided) for value in args):
        return False
    first, *others = args
    whole = of(first) if isinstance(first, Tensor) else None
    if whole is None:
        # Batch norms count their calls.
        counts = isinstance(first, Tensor) and first.dtype == torch.int64 and first.is_contiguous()
        return counts and func is _aten.add_.Tensor and type(others[0]) is int and not kwargs
    return all(isinstance(value, _Number) or (isinstance(value, Tensor) and of(value) == whole) for value in others)


def _elementwise(args: Sequence[Any]) -> Shape | None:
    """Of tensors of one shape, maybe parts of others, or that repeat themselves to come to it."""
    tensors = [value for value in args if isinstance(value, Tensor)]
    if not all(isinstance(value, Tensor | _Number) for value in args):
        return None
    # None is among the shapes where a tensor is not contiguous.
    found = {of(value) for value in tensors}
    if None in found:
        found = {of_part(value) for value in tensors}
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
    found = [of(tensor) for tensor in tensors]
    others = {shape and (*shape.shape[:dim], *shape.shape[dim:][1:], len(shape.shape), shape.dtype) for shape in found}
    first = found[0] if len(others) == 1 else None
    if first is None or not -len(first.shape) <= dim < len(first.shape):
        return None
    whole = [*first.shape]
    whole[dim] = sum(shape.shape[dim] for shape in found if shape is not None)
    return Shape(tuple(whole), contiguous(whole), first.dtype)


def _sliced_back(grad: Tensor, sizes: Sequence[int], *_how: Any) -> Shape | None:
    """Of the backward pass of a part."""
    return Shape(tuple(sizes), contiguous(sizes), grad.dtype) if grad.dtype in PRECISE else None


def _reduced(x: Tensor, dims: Sequence[int] | None, keepdim: bool = False) -> Shape | None:
    """Of a sum or a mean along some dimensions."""
    whole, rank = of(x), x.dim()
    gone = {dim % rank for dim in dims or () if -rank <= dim < rank}
    if whole is None or not dims or len(gone) < len(dims) or not x.numel():
        return None
    lengths = [1 if place in gone else length for place, length in enumerate(whole.shape)]
    shape = tuple(length for place, length in enumerate(lengths) if keepdim or place not in gone)
    return Shape(shape, contiguous(shape), whole.dtype)


def _product(x: Tensor, y: Tensor) -> Shape | None:
    """Of a product of matrices of any strides."""
    if x.dim() != 2 or y.dim() != 2 or x.shape[1] != y.shape[0] or x.dtype != y.dtype or x.dtype not in PRECISE:
        return None
    shape = (x.shape[0], y.shape[1])
    return Shape(shape, contiguous(shape), x.dtype) if min(*shape, x.shape[1]) else None


def _product_and_vector(added: Tensor, x: Tensor, y: Tensor) -> Shape | None:
    """Of a product of matrices, to each row of which a vector is added."""
    found = _product(x, y)
    return found if found is not None and (added.dtype, added.shape) == (found.dtype, found.shape[1:]) else None


def _normalized(x: Tensor, *how: Any) -> tuple[Shape, Shape, Shape] | None:
    """Of a batch norm in training: the result, and a mean and a deviation for each channel."""
    whole, same, training = of(x), _of_channels(x, how[:4]), how[4]
    return (whole, same, same) if training and whole and same else None


def _normalized_back(grad: Tensor, x: Tensor, *how: Any) -> tuple[Shape | None, ...] | None:
    """Of the backward pass of a batch norm in training: gradients of input, and of weight and bias if asked for."""
    *others, training, _, mask = how
    whole, same = of(x), _of_channels(x, others)
    ordered = grad.dtype == x.dtype and grad.shape == x.shape and in_order(grad)
    plain = training and same and ordered and all(isinstance(value, Tensor) for value in others[-2:])
    return (whole, *(same if wanted else None for wanted in mask[1:])) if plain else None


def _log_softmax(x: Tensor, dim: int, precise: bool) -> Shape | None:
    """Of the logarithm of a softmax, in the type of its input."""
    whole = of(x)
    return whole if whole is not None and 0 <= dim < len(whole.shape) and not precise and x.numel() else None


def _log_softmax_back(grad: Tensor, output: Tensor, dim: int, dtype: torch.dtype) -> Shape | None:
    """Of the backward pass of the same."""
    same = of(grad) == of(output) and grad.dtype == dtype
    return _log_softmax(output, dim, precise=False) if same else None


def _likelihood(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, _ignored: int
) -> tuple[Shape, Shape] | None:
    """Of the negative log likelihood of the classes of a batch, taken together: a number, and what it is divided by."""
    whole = of(x)
    classes = target.dtype == torch.int64 and target.shape == x.shape[:1]
    fits = whole is not None and len(whole.shape) == 2 and classes and x.numel()
    number = Shape((), (), x.dtype)
    return (number, number) if fits and weight is None and reduction else None


def _likelihood_back(grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, *how: Any) -> Shape | None:
    """Of the backward pass of the same."""
    reduction, ignored, _ = how
    known = _likelihood(x, target, weight, reduction, ignored) is not None and of(grad) == Shape((), (), x.dtype)
    return of(x) if known else None


def _entropy(
    x: Tensor, target: Tensor, weight: Tensor | None = None, positive: Tensor | None = None, reduction: int = 1
) -> Shape | None:
    """Of binary cross-entropy without weights: a number for all elements, or one for each."""
    whole = of(x)
    if whole is None or whole != of(target) or weight is not None or positive is not None:
        return None
    return Shape((), (), whole.dtype) if reduction else whole


def _of_channels(x: Tensor, others: Sequence[Tensor | None]) -> Shape | None:
    """The shape of a number for each channel of x, if the others, as far as there are any, have it."""
    whole = of(x)
    # Of a single value there is no variance.
    if whole is None or len(whole.shape) < 2 or x.numel() <= whole.shape[1]:
        return None
    expected = Shape(whole.shape[1:2], (1,), whole.dtype)
    return expected if all(value is None or of(value) == expected for value in others) else None
