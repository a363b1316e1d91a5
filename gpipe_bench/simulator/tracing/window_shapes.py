"""Shapes that convolutions, pooling and upsampling give, of contiguous images and parts of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.simulator.tracing.shapes import Shape, contiguous, of, of_part

__all__ = [
    "convolved",
    "convolved_back",
    "pooled",
    "pooled_and_places",
    "pooled_back",
    "pooled_places_back",
    "upsampled",
    "upsampled_back",
]


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, *how: Any) -> Shape | None:
    """Of a convolution, which makes a number for each place where the weight fits into the padded input."""
    stride, padding, dilation, transposed, _, groups = how
    whole, kernel = of(x) or of_part(x), of(weight)
    if whole is None or kernel is None or whole.dtype != kernel.dtype or transposed or len(whole.shape) < 3:
        return None
    if len(whole.shape) != len(kernel.shape) or whole.shape[1] != groups * kernel.shape[1] or kernel.shape[0] % groups:
        return None
    if bias is not None and of(bias) != Shape(kernel.shape[:1], (1,), whole.dtype):
        return None
    lengths = _windows(whole.shape[2:], kernel.shape[2:], stride, padding, dilation)
    shape = (whole.shape[0], kernel.shape[0], *lengths)
    return Shape(shape, contiguous(shape), whole.dtype) if lengths and min(*shape, *whole.shape) > 0 else None


def _windows(lengths: Sequence[int], *how: Sequence[int]) -> list[int]:
    """How many places a window has along each axis; ``how``: its size, stride, padding and dilation along each.

    Empty where PyTorch would refuse them.
    """
    axes, least = [lengths, *how], (1, 1, 1, 0, 1)
    if len({len(axis) for axis in axes}) > 1 or any(min(axis) < few for axis, few in zip(axes, least, strict=True)):
        return []
    return [
        (length + 2 * padding - dilation * (size - 1) - 1) // stride + 1
        for length, size, stride, padding, dilation in zip(*axes, strict=True)
    ]


def convolved_back(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, *how: Any
) -> tuple[Shape | None, ...] | None:
    """Of the backward pass of a convolution: gradients of input, weight and bias, as far as they are asked for."""
    found, mask = [of(grad) or of_part(grad), of(x) or of_part(x), of(weight)], how[-1]
    whole, kernel = found[1:]
    if whole is None or kernel is None or len({shape and shape.dtype for shape in found}) > 1:
        return None
    if mask[2] and bias_sizes is None:
        return None
    bias = Shape(tuple(bias_sizes or ()), (1,), whole.dtype)
    return tuple(shape if asked else None for shape, asked in zip((whole, kernel, bias), mask, strict=True))


def pooled(
    x: Tensor, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0, 0), *how: Any
) -> Shape | None:
    """Of pooling whole windows of images; ``how``: whether to take others, count padding, and a divisor."""
    return _pool(x, size, stride, padding, (1, 1)) if not any(how[:1]) and 0 not in how[2:] else None


def pooled_and_places(
    x: Tensor, size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0, 0), *how: Any
) -> tuple[Shape, Shape] | None:
    """Of the largest in whole windows of images, and where they are; ``how``: dilation, whether to take others too."""
    found = _pool(x, size, stride, padding, how[0] if how else (1, 1)) if not any(how[1:]) else None
    return None if found is None else (found, found._replace(dtype=torch.int64))


def _pool(x: Tensor, size: Sequence[int], stride: Sequence[int], *how: Sequence[int]) -> Shape | None:
    whole, padding = of(x), how[0]
    if whole is None or len(whole.shape) != 4 or len(size) != len(padding):
        return None
    if any(2 * more > length for more, length in zip(padding, size, strict=True)):
        return None
    lengths = _windows(whole.shape[2:], size, stride or size, *how)
    shape = (*whole.shape[:2], *lengths)
    return Shape(shape, contiguous(shape), whole.dtype) if lengths and min(*shape, *whole.shape) > 0 else None


def pooled_back(grad: Tensor, x: Tensor, *how: Any) -> Shape | None:
    """Of the backward pass of pooling."""
    *window, larger, _, _ = how
    return of(x) if _arrives(grad, pooled(x, *window, larger)) else None


def pooled_places_back(grad: Tensor, x: Tensor, *how: Any) -> Shape | None:
    """Of the backward pass of taking the largest."""
    *window, places = how
    found = pooled_and_places(x, *window)
    return of(x) if found is not None and _arrives(grad, found[0]) and _arrives(places, found[1]) else None


def _arrives(grad: Tensor, result: Shape | None) -> bool:
    """Whether a tensor of any strides is the gradient of a result, or like one."""
    return result is not None and (tuple(grad.shape), grad.dtype) == (result.shape, result.dtype)


def upsampled(x: Tensor, size: Sequence[int] | None, *_scales: float | None) -> Shape | None:
    """Of images that are made larger."""
    whole = of(x)
    if whole is None or len(whole.shape) != 4 or size is None or len(size) != 2 or min(*size, *whole.shape) < 1:
        return None
    shape = (*whole.shape[:2], *size)
    return Shape(shape, contiguous(shape), whole.dtype)


def upsampled_back(grad: Tensor, size: Sequence[int], before: Sequence[int], *_scales: float | None) -> Shape | None:
    """Of the backward pass of the same."""
    whole, shape = of(grad), tuple(before)
    fits = whole is not None and whole.shape == (*shape[:2], *size) and len(shape) == 4 and min(*shape, *size) > 0
    return Shape(shape, contiguous(shape), grad.dtype) if fits else None
