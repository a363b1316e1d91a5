"""Operators that accelerators run as one kernel, and PyTorch writes out for devices that it does not know.

The simulator registers the kernels for the meta device while it traces, the emulator for its virtual devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from gpipe_bench.kernels.attention import attention
from gpipe_bench.kernels.fused_kernels import define, dropout, gru_cell, lstm_cell, mish_backward, rms_norm

_aten: Final[Any] = torch.ops.aten
_WRITTEN_OUT: Final = torch._C.DispatchKey.CompositeImplicitAutograd  # noqa: SLF001 - it has no public name
_library: Final[Any] = torch.library  # PyTorch leaves it untyped


@contextmanager
def accelerator_kernels() -> Iterator[None]:
    """Run operators on the meta device as accelerators run them, as long as the block lasts."""
    with _library._scoped_library("aten", "IMPL") as library:  # noqa: SLF001 - it has no public name
        register_fused(library, "AutogradMeta")
        library.impl(_aten.dropout.default, _tried(dropout, _aten.dropout.default), "AutogradMeta")
        yield


def register_fused(library: Any, *keys: str) -> None:
    """Let these operators be one kernel each.

    Args:
        library: keeps the registrations, as long as it lives.
        keys: dispatch keys of the device.
    """
    for operator, one in (
        (_aten.scaled_dot_product_attention.default, attention),
        (_aten.rms_norm.default, rms_norm),
        (_aten.mish_backward.default, mish_backward),
        (_aten.lstm_cell.default, lstm_cell),
        (_aten.gru_cell.default, gru_cell),
        *((operator, partial(fused, operator)) for operator in RECURRENT),
    ):
        for key in keys:
            library.impl(operator, _tried(one, operator), key)


def _tried(one: Any, operator: Any) -> Callable[..., Any]:
    """``one`` where it gives something, else what PyTorch writes the operator out as."""

    def kernel(*args: Any, **kwargs: Any) -> Any:
        found = one(*args, **kwargs)
        # Not `decompose`, which prefers a version in Python of its own where PyTorch has one.
        return operator._op_dk(_WRITTEN_OUT, *args, **kwargs) if found is None else found  # noqa: SLF001

    return kernel


RECURRENT: Final[Mapping[Any, int]] = {
    _aten.lstm.input: 4,
    _aten.gru.input: 3,
    _aten.rnn_tanh.input: 1,
    _aten.rnn_relu.input: 1,
}
"""Operators that run on an accelerator as one, and the gates of each."""


# What is not used here is part of the operations' signatures.
def _recurrence(gates: Tensor, weight: Tensor, _moments: int) -> Tensor:
    return gates.new_empty((*gates.shape[:-1], weight.shape[1]))


def _recurrence_backward(_grad: Tensor, gates: Tensor, _weight: Tensor, _moments: int) -> Tensor:
    return torch.empty_like(gates)


define("recurrence(Tensor gates, Tensor weight, int moments) -> Tensor", _recurrence)
define("recurrence_backward(Tensor grad, Tensor gates, Tensor weight, int moments) -> Tensor", _recurrence_backward)


def fused(func: Any, *args: Any) -> tuple[Tensor, ...] | None:
    """What one of :data:`RECURRENT` gives: the outputs (T, B, D H), then each state after the last moment (L D, B, H).

    A layer is three operations, as cuDNN runs it: the products of all its inputs at once, the recurrence, which reads
    its weights at every moment, and in the backward pass the gradient of these weights, at once again.

        x (T, B, I) ── product with w_ih ──> gates (T, B, G H) ── recurrence with w_hh ──> y (T, B, H)

    Args:
        func: which one.
        args: (input, states, weights, has biases, layers, dropout, training, bidirectional, batch first).

    Returns:
        None for an LSTM with projections, which stays what PyTorch makes of it.
    """
    x, states, weights, biased, layers, dropout, training, bidirectional, batch_first = args
    first = states[0] if isinstance(states, list | tuple) else states
    if weights[1].shape[1] * RECURRENT[func] != weights[1].shape[0] or first.shape[-1] != weights[1].shape[1]:
        return None
    time = 1 if batch_first else 0
    count, ends = (4 if biased else 2), list[Tensor]()
    for layer in range(layers):
        outputs = []
        for way in range(2 if bidirectional else 1):
            own = weights[count * len(ends) : count * (len(ends) + 1)]
            gates = functional.linear(x, own[0], own[2] if biased else None)
            operands = gates, own[1], own[3] if biased else None, x.shape[time]
            outputs.append(_Recurrence.apply(*operands))  # type: ignore[no-untyped-call, unused-ignore]  # PyTorch's
            ends.append(outputs[-1].select(time, 0 if way else -1))
        x = torch.cat(outputs, -1) if bidirectional else outputs[0]
        if training and 0 < dropout < 1 and layer < layers - 1:
            x = torch.native_dropout(x, dropout, True)[0]
    last = torch.stack(ends)
    return (x, last, last.clone()) if func is _aten.lstm.input else (x, last)


class _Recurrence(torch.autograd.Function):
    is_pure_to_gpipe_bench = True

    @staticmethod
    def forward(ctx: Any, gates: Tensor, weight: Tensor, bias: Tensor | None, moments: int) -> Tensor:
        output: Tensor = torch.ops.gpipe_bench.recurrence(gates, weight, moments)
        # The gates after their activation take the place of those before.
        ctx.save_for_backward(gates, weight, output)
        ctx.moments, ctx.biased = moments, bias is not None
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gates, weight, output = ctx.saved_tensors
        inner = torch.ops.gpipe_bench.recurrence_backward(grad, gates, weight, ctx.moments)
        flat = inner.reshape(-1, inner.shape[-1])
        of_weight = flat.t() @ output.reshape(-1, output.shape[-1])
        return inner, of_weight, flat.sum(0) if ctx.biased else None, None
