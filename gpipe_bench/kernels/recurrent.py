"""Recurrent layers as cuDNN runs them: fused, with a product and an elementwise kernel for each moment of a sequence.

A layer is three operations: the products of all its inputs at once, the recurrence, which reads its weights at every
moment, and in the backward pass the gradient of these weights, at once again.

    x (T, B, I) ── product with w_ih ──> gates (T, B, G H) ── recurrence with w_hh ──> y (T, B, H)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from gpipe_bench.kernels.fused_kernels import define

_aten: Final = torch.ops.aten

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


def fused(func: Any, args: Sequence[Any]) -> tuple[Tensor, ...] | None:
    """What one of :data:`RECURRENT` gives: the outputs (T, B, D H), then each state after the last moment (L D, B, H).

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
