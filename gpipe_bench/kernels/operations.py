"""Which kernels an aten operation launches: floating-point operations, bytes, scratch memory.

FLOPs come from PyTorch's own formulas (``torch.utils.flop_counter``), bytes from the operands: each is read once and
each result written once, unless a table below knows better. Views and allocations launch nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.flop_counter import conv_flop_count, flop_registry

from gpipe_bench.kernels.attention import AttentionCall
from gpipe_bench.kernels.kernel import FOREACH, Kernel, Part
from gpipe_bench.kernels.parts import (
    Pass,
    attention_part,
    bias_parts,
    convolution_parts,
    dense_copies,
    occupied,
    parts_of,
)
from gpipe_bench.kernels.recurrent import recurrent_kernel

_aten: Final = torch.ops.aten

# Operations that only reserve memory, or relabel it in a way that PyTorch does not declare as a view.
_FREE_OF_CHARGE: Final = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "lift_fresh"}
)
# What they overwrite is not read.
_WRITE_ONLY: Final = frozenset(
    {"fill_", "zero_", "copy_", "bernoulli_", "uniform_", "normal_", "random_", "exponential_"}
)
# They read as much of their first operand as they give, not all of it.
_GATHER: Final = frozenset({"embedding", "index_select", "gather", "index", "take"})
# Statistics first, then the result: two kernels, two passes over what is read.
_TWO_PASSES: Final = frozenset(
    {"native_batch_norm", "_native_batch_norm_legit", "native_batch_norm_backward", "_batch_norm_with_update"}
)
# Name -> where the kernel size and the stride stand among the arguments. Windows that overlap read their rows again.
_POOLS: Final = {
    "avg_pool2d": (1, 2),
    "avg_pool2d_backward": (2, 3),
    "max_pool2d_with_indices": (1, 2),
    "max_pool2d_with_indices_backward": (2, 3),
}
# Their backward passes are given the input for its shape alone.
_SHAPE_ONLY: Final = frozenset({"avg_pool2d_backward", "max_pool2d_with_indices_backward"})
# Winograd's F(4x4, 3x3) turns each 4x4 tile of a plane into 6x6 numbers, and each 3x3 filter too (Lavin and Gray,
# arXiv 1509.09308); the non-fused form keeps all of them in scratch memory.
_TILE_GROWTH: Final = (36, 16)
_FILTER_GROWTH: Final = 36 // 9


def kernels_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> list[Kernel]:
    """Kernels that a call of an aten overload launches, by what it was called with and what it gave."""
    name = func.overloadpacket.__name__
    if name in _FREE_OF_CHARGE or func.is_view:
        return []
    if func is _aten.convolution.default:
        return [_convolution(args, result)]
    if func is _aten.convolution_backward.default:
        return _convolution_backward(args, result)
    recurrence = recurrent_kernel(func, args, result)
    if recurrence is not None:
        return [recurrence]
    # An operation in place on many tensors gives nothing.
    results = tensors_of(args[0] if result is None and args else result)
    flop, attention = 0, None
    kernel_class, arithmetic = "memory_bound", "elementwise"
    if func.overloadpacket in flop_registry:
        flop = int(flop_registry[func.overloadpacket](*args, **kwargs, out_val=result))
        # A product of complex numbers is four of real ones.
        flop *= 4 if results and results[0].is_complex() else 1
        if "attention" in name:
            attention = AttentionCall.of(func, args, kwargs)
            flop = attention.unmasked(flop)
        kernel_class, arithmetic = "other_conv_matmul", "matmul"
    operands = _used(name, args, kwargs)
    read = _bytes_read(name, operands, results)
    written = sum(occupied(tensor) for tensor in results)
    if not read and not written:
        return []
    launches = 2 if name in _TWO_PASSES else 1
    read *= _overlap(name, args) if name in _POOLS else launches
    if attention is None:
        parts = parts_of(name, args, operands, results, flop)
    else:
        parts = (attention_part(name, operands, results, flop, attention),)
    return [Kernel(name, kernel_class, arithmetic, _dtype(results), launches, flop, read, written, 0, parts)]


def tensors_of(value: object) -> list[Tensor]:
    """The strided tensors in (lists and tuples of) arguments or results."""
    if isinstance(value, Tensor):
        return [value] if value.layout is torch.strided else []
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in tensors_of(item)]
    return []


def _used(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands that are read, each once: x * x reads x once."""
    operands = tensors_of([*args[name.removeprefix(FOREACH) in _WRITE_ONLY :], *kwargs.values()])
    if name in _SHAPE_ONLY:
        operands = operands[:1] + operands[2:]
    return list({id(tensor): tensor for tensor in operands}.values())


def _bytes_read(name: str, operands: list[Tensor], results: list[Tensor]) -> int:
    sizes = [occupied(tensor) for tensor in operands]
    if name in _GATHER and sizes:
        sizes[0] = min(sizes[0], sum(occupied(tensor) for tensor in results))
    return sum(sizes)


def _overlap(name: str, args: Sequence[Any]) -> int:
    """How many windows a row of the image is part of."""
    kernel, stride = (args[place] if len(args) > place else [] for place in _POOLS[name])
    return -(-int(kernel[0]) // int(stride[0] if stride else kernel[0]))


def _dtype(results: Sequence[Tensor]) -> str:
    return str(results[0].dtype).removeprefix("torch.") if results else "float32"


def _convolution(args: Sequence[Any], result: Tensor) -> Kernel:
    read = sum(occupied(tensor) for tensor in tensors_of(args[:3]))
    kernel = _convolution_kernel("forward", args[1:], (args[0], result), read, occupied(result))
    return kernel._replace(parts=(*dense_copies(args[:1]), *(kernel.parts or ()), *bias_parts(result, args[2])))


def _convolution_backward(args: Sequence[Any], result: Sequence[Tensor | None]) -> list[Kernel]:
    """A kernel for the gradient of the data, one for that of the weight, one for that of the bias, as far as asked."""
    grad, x, weight = args[:3]
    # (grad, input, weight, bias sizes, stride, ...) as (weight, bias, stride, ...) of the forward convolution.
    geometry = (weight, None, *args[4:10])
    kernels: list[Kernel] = []
    # Each takes as many products as the forward pass. PyTorch's own count of them leaves groups out.
    passes: tuple[tuple[Pass, Tensor, Tensor | None], ...] = (("data", weight, result[0]), ("weight", x, result[1]))
    for name, other, gradient in passes:
        if gradient is not None:
            read = occupied(grad) + occupied(other)
            kernel = _convolution_kernel(name, geometry, (x, grad), read, occupied(gradient))
            # Both use the same copies.
            copies = () if kernels else dense_copies((grad, x))
            kernels.append(kernel._replace(parts=(*copies, *(kernel.parts or ()))))
    bias = result[2]
    if bias is not None:
        sizes = occupied(grad), occupied(bias)
        parts = (Part("stream", sum(sizes)),)
        op = "convolution_backward_bias"
        kernels.append(Kernel(op, "memory_bound", "elementwise", _dtype([bias]), 1, 0, *sizes, 0, parts))
    return kernels


def _convolution_kernel(
    direction: Pass, geometry: Sequence[Any], planes: tuple[Tensor, Tensor], read: int, written: int
) -> Kernel:
    """A convolution from x to y, or one of its gradients, which have its shapes.

    Args:
        direction: which of these.
        geometry: (weight, bias, stride, padding, dilation, transposed, output padding, groups).
        planes: x and y, or anything of their shapes.
        read: bytes read.
        written: bytes written.
    """
    weight, _, stride, _, dilation, transposed, _, groups = geometry[:8]
    dtype = _dtype(planes[1:])
    x, y = planes
    flop = int(conv_flop_count(list(x.shape), list(weight.shape), list(y.shape), transposed=transposed))
    op = "convolution" if direction == "forward" else f"convolution_backward_{direction}"
    parts = convolution_parts(direction, planes, weight, (stride, groups), flop, transposed=transposed)
    plain = not transposed and groups == 1 and set(stride) == {1} and set(dilation) == {1}
    if plain and tuple(weight.shape[2:]) == (3, 3):
        tiles = _TILE_GROWTH[0] * sum(occupied(plane) for plane in planes) // _TILE_GROWTH[1]
        workspace = tiles + _FILTER_GROWTH * occupied(weight)
        return Kernel(op, "conv3x3_stride1", "convolution", dtype, 1, flop, read, written, workspace, parts)
    # A filter of one point is a matrix product.
    kernel_class = "spatial_conv" if any(edge > 1 for edge in weight.shape[2:]) else "other_conv_matmul"
    return Kernel(op, kernel_class, "convolution", dtype, 1, flop, read, written, 0, parts)
