"""What an operation runs on a GPU of today: one kernel or more, each by the unit that bounds it.

    bytes                        copies and arithmetic whose tensors are laid out alike
    elements per second          strided and transposed operands, pools, norms, softmax, column sums
    floating-point operations    products, convolutions, attention

Some operations first copy what is not dense, add a bias afterwards, or fill a tensor before they write a part of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

from gpipe_bench.kernels.call import Call, Convolution, occupied
from gpipe_bench.kernels.kernel import FOREACH, Part

# Functions that take longer to compute than two bytes take to read.
_HEAVY: Final = frozenset(
    f"{name}{end}"
    for name in ("gelu", "silu", "mish", "tanh", "sigmoid", "softplus", "elu", "native_dropout")
    for end in ("", "_", "_backward")
)
_LAST: Final = {4: torch.channels_last, 5: torch.channels_last_3d}
# Rows and columns of a tile of a matrix product.
_TILE: Final = 64
# A matrix whose rows begin at a multiple of so many bytes can be read by the fast kernels.
_ALIGNMENT: Final = 16
# Elements of the longest row that a softmax reads once.
_ROW: Final = 1024
# Column sums of narrower matrices keep part of the device idle.
_COLUMNS: Final = 512
# A number of a filter takes as long to transpose as so many of a plane.
_FILTERS: Final = 4


def parts_of(call: Call) -> tuple[Part, ...] | None:
    """The parts of an operation; None for a recurrence, for which profiles have no constants."""
    if call.moments:
        return None
    flop = call.flop or 0
    if call.convolution is not None:
        result = call.results[0]
        bias = [Part("strided", 2 * result.nbytes, result.numel())] if call.operands[2:] else []
        return (*dense_copies(call.convolution.dense), *_convolution(call.convolution, flop), *bias)
    if call.attention is not None:
        kind = "attention_backward" if call.is_backward else "attention"
        return (Part(kind if call.attention.drops else f"{kind}_no_dropout", call.moved, flop, call.attention.keys),)
    return (_product(call, flop),) if flop else tuple(_KINDS.get(call.name, _pointwise)(call))


def is_usual(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous, or has its channels last."""
    last = _LAST.get(tensor.dim())
    return tensor.is_contiguous() or (last is not None and tensor.is_contiguous(memory_format=last))


def dense_copies(tensors: Sequence[Tensor]) -> tuple[Part, ...]:
    """Copies of the tensors that are not dense."""
    strewn = [tensor for tensor in tensors if not is_usual(tensor)]
    layouts = [[torch.empty(tensor.shape, device="meta").stride(), tensor.stride()] for tensor in strewn]
    kinds = [_access(tensor.shape, layout) for tensor, layout in zip(strewn, layouts, strict=True)]
    return tuple(Part(kind, 2 * tensor.nbytes, tensor.numel()) for kind, tensor in zip(kinds, strewn, strict=True))


def _convolution(convolution: Convolution, flop: int) -> tuple[Part, ...]:
    """The parts of a convolution or of one of its gradients, without its bias.

    Matrix units take operands with their channels last. Others are transposed before and after, but for filters of one
    point and stride 1, which are matrix products. Filters of one channel each are depthwise: other kernels, which are
    slower still for gradients. A transposed convolution computes what is the gradient of the data of another one.
    """
    direction, x, y, weight, stride, _, transposed, groups, _ = convolution
    x, y = (y, x) if direction == "data" else (x, y)
    moved = x.nbytes + y.nbytes + weight.nbytes
    if groups > 1 == weight.shape[1]:
        forward = direction == ("data" if transposed else "forward")
        return (Part("depthwise" if forward else "depthwise_backward", moved, flop),)
    kind = "weight_gradient" if direction == "weight" else "convolution"
    incoming, outgoing = (max(1, plane.shape[1] // groups) for plane in (x, y))
    padded = flop // (incoming * outgoing) * _up(incoming, _ALIGNMENT) * _up(outgoing, _TILE)
    pixels = prod(x.shape[2:])
    point = set(weight.shape[2:]) == set(stride) == {1}
    if point and pixels * x.element_size() % _ALIGNMENT == 0:
        return (Part(kind, moved, padded // pixels * _up(pixels, _TILE)),)
    if is_usual(x) and not x.is_contiguous():
        return (Part(kind, moved, padded),)
    before = Part("transposes", 2 * (x.nbytes + weight.nbytes), x.numel() + _FILTERS * weight.numel())
    return before, Part(kind, moved, padded), Part("transposes", 2 * y.nbytes, y.numel())


def _product(call: Call, flop: int) -> Part:
    result = call.results[0]
    if result.dim() > 2:
        # Whole tiles are computed, which matters where there are many small products.
        rows, columns = result.shape[-2:]
        flop = flop // (rows * columns) * _up(rows, _TILE) * _up(columns, _TILE)
    matrices = [tensor for tensor in (*call.operands, *call.results) if tensor.dim() > 1]
    aligned = all(max(tensor.stride()[-2:]) * tensor.element_size() % _ALIGNMENT == 0 for tensor in matrices)
    return Part("product" if aligned else "product_unaligned", call.moved, flop)


def _batch_norm(call: Call) -> list[Part]:
    """By cuDNN, which takes dense operands, or by PyTorch without weights and in bfloat16."""
    x = call.args[1 if call.is_backward else 0]
    own = call.args[2 if call.is_backward else 1] is None or x.dtype is torch.bfloat16
    kind = "norm_backward" if call.is_backward else "norm" if own else "cudnn_norm"
    copies = () if own else dense_copies(call.args[: 2 if call.is_backward else 1])
    return [*copies, Part(kind, (5 if call.is_backward else 3) * occupied(x), x.numel(), x.shape[1])]


def _layer_norm(call: Call) -> list[Part]:
    return [*dense_copies(call.operands), _whole(call, "layer_norm_backward" if call.is_backward else "layer_norm")]


def _softmax(call: Call) -> list[Part]:
    """That of attention multiplies first in its backward pass; rows that are long are read again."""
    size = occupied(call.largest)
    first = [Part("stream", 3 * size)] if call.name == "_softmax_backward_data" else []
    again = size if call.largest.shape[-1] > _ROW else 0
    return [*dense_copies(call.operands), *first, Part("heavy", call.moved + again, call.largest.numel())]


def _pool(call: Call) -> list[Part]:
    average, result = call.name.startswith("avg"), call.results[0]
    kind = f"{'avg' if average else 'max'}_pool{'_backward' if call.is_backward else ''}"
    windows = 1
    if average and call.is_backward:
        # A thread for each input looks at all windows that it is part of.
        kernel, stride = call.args[2], call.args[3] if len(call.args) > 3 else []
        windows = 4 - (-prod(kernel) // prod(stride or kernel))
    fill = [Part("stream", occupied(result))] if kind == "max_pool_backward" else []
    return [*dense_copies(call.operands), *fill, Part(kind, call.moved, result.numel() * windows)]


def _upsample(call: Call) -> list[Part]:
    return [*dense_copies(call.operands), _whole(call, "strided")]


def _partly(call: Call) -> list[Part]:
    """Fill the result, then write a part of it."""
    small = min(call.operands[0], call.results[0], key=Tensor.numel)
    return [Part("stream", occupied(call.results[0])), Part("strided", 2 * occupied(small), small.numel())]


def _loss(call: Call) -> list[Part]:
    """One number of each row is read; the gradient is filled with zeros, but for these."""
    targets = call.args[2 if call.is_backward else 1]
    return [Part("stream", occupied(call.results[0]) + occupied(targets))]


def _sum(call: Call) -> list[Part]:
    x, axes = call.args[0], call.args[1] if len(call.args) > 1 else None
    if not axes or x.dim() - 1 in {axis % x.dim() for axis in axes}:
        return [_whole(call, "stream")]
    columns = x.shape[-1]
    return [Part("column_sum", call.moved, x.numel() * max(columns, _COLUMNS) // columns)]


def _together(call: Call) -> list[Part]:
    return [_whole(call, "stream" if all(map(is_usual, call.operands)) else "strided")]


def _pointwise(call: Call) -> list[Part]:
    """An elementwise operation by how it goes through its tensors; all others by their bytes."""
    if not call.results or call.name.startswith(FOREACH):
        return [Part("stream", call.moved)]
    shape = call.results[0].shape
    tensors = [call.results[0], *(tensor for tensor in call.operands if tensor.numel() > 1)]
    try:
        kind = _access(shape, [tensor.expand(shape).stride() for tensor in tensors])
    except RuntimeError:
        kind = "stream"
    return [_whole(call, "heavy" if kind == "stream" and call.name in _HEAVY else kind)]


_KINDS: Final[Mapping[str, Callable[[Call], list[Part]]]] = {
    name: kind
    for kind, names in (
        (_batch_norm, "native_batch_norm _native_batch_norm_legit _batch_norm_with_update native_batch_norm_backward"),
        (_layer_norm, "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward"),
        (_softmax, "_softmax _log_softmax _safe_softmax _softmax_backward_data _log_softmax_backward_data"),
        (_pool, "avg_pool2d avg_pool2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward"),
        (_upsample, "upsample_nearest2d upsample_nearest2d_backward"),
        (_partly, "slice_backward select_backward constant_pad_nd embedding_dense_backward"),
        (_loss, "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"),
        (_sum, "sum"),
        (_together, "cat stack"),
    )
    for name in names.split()
}


def _access(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> str:
    """How a kernel goes through tensors of one shape, the one that it writes first.

    ``stream`` where all are laid out alike, ``strided`` where some are spread out, ``transposed`` where neighbours in
    memory are no neighbours in the first one.
    """
    steps_of = zip(*strides, strict=True)
    axes = sorted((steps, length) for steps, length in zip(steps_of, shape, strict=True) if length > 1)
    merged: list[tuple[tuple[int, ...], int]] = []
    for steps, length in axes:
        if merged and all(step == low * merged[-1][1] for step, low in zip(steps, merged[-1][0], strict=True)):
            merged[-1] = merged[-1][0], merged[-1][1] * length
        else:
            merged.append((steps, length))
    if len(merged) < 2:
        return "stream"
    return "transposed" if any(step > 1 for step in merged[0][0]) else "strided"


def _whole(call: Call, kind: str) -> Part:
    """All that it does as one kernel."""
    return Part(kind, call.moved, call.largest.numel())


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
