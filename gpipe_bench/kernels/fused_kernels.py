"""Functions that accelerators run as one kernel, and the meta device as many.

dropout          y and a mask of one byte per element      native_dropout
RMS norm         y (..., N) and 1 / rms (..., 1)           _fused_rms_norm, and its backward pass
Mish             the backward pass, from x                 mish_backward
cell of an LSTM  h and c (B, H), and its gates (B, 4 H)    _thnn_fused_lstm_cell, and its backward pass
cell of a GRU    h (B, H), and what to go back from        _thnn_fused_gru_cell, and its backward pass
                 (B, 5 H)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

_aten: Final = torch.ops.aten
_HALVES: Final = (torch.float16, torch.bfloat16)
_LAST: Final = (torch.channels_last, torch.channels_last_3d)

_library: Final[Any] = torch.library  # PyTorch leaves it untyped
_LIBRARY: Final = _library.Library("gpipe_bench", "FRAGMENT")


def define(signature: str, on_meta: Callable[..., Any]) -> None:
    """Define an operation of the namespace ``gpipe_bench`` with what it gives on the meta device."""
    _LIBRARY.define(signature)
    _LIBRARY.impl(signature.partition("(")[0], on_meta, "Meta")


# What is not used here is part of the operations' signatures.
def _rms_norm(x: Tensor, axes: int, _weight: Tensor | None) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - axes], *[1] * axes)
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    return y, x.new_empty(rows, dtype=torch.float32 if x.dtype in _HALVES else x.dtype)


def _rms_norm_backward(_grad: Tensor, x: Tensor, _rstd: Tensor, weight: Tensor | None, trained: bool) -> list[Tensor]:
    of_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return [of_x, torch.empty_like(weight)] if weight is not None and trained else [of_x]


def _mish_backward(_grad: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _gru_cell(
    _gates: Tensor, _hidden: Tensor, h: Tensor, _b_ih: Tensor | None, _b_hh: Tensor | None
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(h), h.new_empty(h.shape[0], 5 * h.shape[1])


def _gru_cell_backward(grad: Tensor, _workspace: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gates = grad.shape[0], 3 * grad.shape[1]
    return grad.new_empty(gates), grad.new_empty(gates), torch.empty_like(grad)


define("_fused_rms_norm(Tensor x, int axes, Tensor? weight) -> (Tensor, Tensor)", _rms_norm)
define(
    "_fused_rms_norm_backward(Tensor grad, Tensor x, Tensor rstd, Tensor? weight, bool trained) -> Tensor[]",
    _rms_norm_backward,
)
define("mish_backward(Tensor grad, Tensor x) -> Tensor", _mish_backward)
define(
    "_thnn_fused_gru_cell(Tensor gates, Tensor hidden, Tensor h, Tensor? b_ih, Tensor? b_hh) -> (Tensor, Tensor)",
    _gru_cell,
)
define("_thnn_fused_gru_cell_backward(Tensor grad, Tensor workspace) -> (Tensor, Tensor, Tensor)", _gru_cell_backward)


def dropout(x: Tensor, p: float, training: bool) -> Tensor | None:
    """``torch.dropout``; None where it drops nothing or everything."""
    return torch.native_dropout(x, p, True)[0] if training and 0 < p < 1 else None


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor | None:
    """``functional.rms_norm``; ``eps`` does not matter here.

    Returns:
        None where PyTorch writes it out on accelerators too: with a weight of another data type, with channels last,
        for complex numbers; and for shapes that it refuses.
    """
    del eps
    shape = tuple(normalized_shape)
    fits = 0 < len(shape) <= x.dim() and tuple(x.shape[-len(shape) :]) == shape
    if not (fits and x.is_floating_point()):
        return None
    if weight is not None and (weight.dtype is not x.dtype or tuple(weight.shape) != shape):
        return None
    plain = x.is_contiguous()
    if not plain and any(x.dim() == 4 + place and x.is_contiguous(memory_format=f) for place, f in enumerate(_LAST)):
        return None
    result: Tensor = _RmsNorm.apply(x, weight, len(shape))  # type: ignore[no-untyped-call, unused-ignore]  # PyTorch's
    return result


def mish_backward(grad: Tensor, x: Tensor) -> Tensor:
    """``torch.ops.aten.mish_backward``."""
    result: Tensor = torch.ops.gpipe_bench.mish_backward(grad, x)
    return result


def lstm_cell(  # noqa: PLR0917 - the signature of PyTorch's function
    x: Tensor,
    states: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> tuple[Tensor, Tensor] | None:
    """``torch.lstm_cell``: the hidden state and that of the cell, both (B, H).

    Returns:
        None without biases, for which PyTorch's operation on meta fails.
    """
    if b_ih is None or b_hh is None:
        return None
    h, c = states
    gates = functional.linear(x, w_ih), functional.linear(h, w_hh)
    hidden, cell, _ = _aten._thnn_fused_lstm_cell(*gates, c, b_ih, b_hh)  # noqa: SLF001 - it has no public name
    return hidden, cell


def gru_cell(  # noqa: PLR0917 - likewise
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor | None = None, b_hh: Tensor | None = None
) -> Tensor:
    """``torch.gru_cell``: the hidden state (B, H)."""
    gates = functional.linear(x, w_ih), functional.linear(h, w_hh)
    result: Tensor = _GruCell.apply(*gates, h, b_ih, b_hh)  # type: ignore[no-untyped-call, unused-ignore]  # likewise
    return result


class _RmsNorm(torch.autograd.Function):
    is_pure_to_gpipe_bench = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, axes: int) -> Tensor:
        y, rstd = torch.ops.gpipe_bench._fused_rms_norm(x, axes, weight)  # noqa: SLF001 - named as PyTorch's
        ctx.save_for_backward(x, weight, rstd)
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        operation = torch.ops.gpipe_bench._fused_rms_norm_backward  # noqa: SLF001 - likewise
        found = operation(grad, x, rstd, weight, trained)
        return found[0], found[1] if trained else None, None


class _GruCell(torch.autograd.Function):
    is_pure_to_gpipe_bench = True

    @staticmethod
    def forward(ctx: Any, *operands: Tensor | None) -> Tensor:
        result: Tensor
        result, workspace = torch.ops.gpipe_bench._thnn_fused_gru_cell(*operands)  # noqa: SLF001 - named as PyTorch's
        ctx.save_for_backward(workspace)
        ctx.biased = operands[3] is not None
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        operation = torch.ops.gpipe_bench._thnn_fused_gru_cell_backward  # noqa: SLF001 - likewise
        of_gates, of_hidden, of_h = operation(grad, *ctx.saved_tensors)
        biases = (of_gates.sum(0), of_hidden.sum(0)) if ctx.biased else (None, None)
        return of_gates, of_hidden, of_h, *biases
