r"""Fork and Join: an edge that orders the backward pass (torchgpipe, arXiv 2004.09910, section 3.2).

    x[i-1] ──► Fork ──► x[i-1]          backward:   Join.backward  (after B(i, j))
                 │                                        │  no gradient, only order
               phony                                Fork.backward
                 ▼                                        │
    x[i] ────► Join ──► x[i]                         R(i-1, j), B(i-1, j)

Without this edge autograd runs whatever is ready and was made last, and recomputes all micro-batches of a partition
before it runs the first backward pass.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpipe_bench.autograd.microbatch import Values, differentiable, replace
from gpipe_bench.autograd.nodes import apply, get_phony, pass_through

__all__ = ["fork"]


class Fork(Function):
    """(x...) -> (x..., phony); backward passes gradients on when all of them, and the Join, have come."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        phony = get_phony(tensors[0].device)
        return pass_through(ctx, (*tensors, phony), (True,) * (len(tensors) + 1))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[:-1]


def fork(values: Values) -> tuple[Values, Tensor | None]:
    """``values`` behind a Fork, and its phony; None where no gradient will ever pass."""
    indices = differentiable(values)
    if not indices:
        return values, None
    *tensors, phony = apply(Fork, *(values[index] for index in indices))
    return replace(values, indices, tensors), phony


class Join(Function):
    """(phony, x...) -> (x...); backward lets the Fork of the phony go, with None: a phony has no gradient."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return pass_through(ctx, tensors, (True,) * len(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


class Together(Function):
    """(x...) -> (x...); backward passes gradients on when all of them have come."""

    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return pass_through(ctx, tensors, (True,) * len(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads
