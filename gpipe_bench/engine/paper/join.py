"""Join: the end of an edge that orders the backward pass, see :mod:`gpipe_bench.engine.paper.fork`."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpipe_bench.engine.microbatch import Values, differentiable, replace
from gpipe_bench.engine.nodes import apply, pass_through

__all__ = ["join"]


class Join(Function):
    """(phony, x...) -> (x...); backward lets the Fork go, with None: a phony has no gradient."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return pass_through(ctx, tensors, (True,) * len(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


def join(values: Values, phony: Tensor) -> Values:
    """``values`` behind a Join to the Fork of ``phony``; some of them must require a gradient."""
    indices = differentiable(values)
    return replace(values, indices, apply(Join, phony, *(values[index] for index in indices)))
