r"""Fork and Join: edges that fix the order of the backward pass (torchgpipe, arXiv 2004.09910, section 3.2).

Autograd runs whatever is ready, and prefers what was made last *in its own thread*. Without further edges it
therefore recomputes all micro-batches of a partition before it runs the first backward pass. The lane

    x[i-1] --> Fork --> x[i-1]          backward:   Join.backward  (after B(i, j))
                 \                                        |  no gradient, only order
                  phony                              Fork.backward
                   \                                      |
    x[i] --------> Join --> x[i]                     R(i-1, j), B(i-1, j)

holds B(i-1, j) back until B(i, j) has been issued. Both are nodes on *all* differentiable tensors of a micro-batch:
Fork passes gradients on when all of them have come. A phony's gradient is None, never zeros: for a defined gradient
autograd would synchronise streams (pytorch#151079).

Where a micro-batch enters a partition by a copy, or as a checkpoint, that node takes the phony itself and no Join is
made. So an input that needs no gradient gets none computed, and the lane does not detour over the thread of device
j-1. Join remains for a partition that is entered without a copy and not checkpointed. Likewise the recomputation at the
outputs of a task is its Fork. On a CPU that does neither, numbers may do without any lane: see
:class:`gpipe_bench.engine.autograd_lanes.AutogradLanes`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

from gpipe_bench.engine.autograd import apply_lane, pass_through
from gpipe_bench.engine.microbatch import Values, differentiable, replace
from gpipe_bench.engine.phony import get_phony

__all__ = ["fork", "join"]


class Fork(Function):
    """(x...) -> (x..., phony)."""

    @staticmethod
    def forward(ctx: FunctionCtx, *tensors: Tensor) -> tuple[Tensor, ...]:
        return pass_through(ctx, (*tensors, get_phony(tensors[0].device)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads[:-1]


class Join(Function):
    """(phony, x...) -> (x...)."""

    @staticmethod
    def forward(ctx: FunctionCtx, phony: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return pass_through(ctx, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None, *grads)


def fork(values: Values) -> tuple[Values, Tensor | None]:
    """Open a lane at ``values``: returns them and a phony, or None where no gradient will ever pass."""
    indices = differentiable(values)
    if not indices:
        return values, None
    *tensors, phony = apply_lane(Fork, *(values[index] for index in indices))
    return replace(values, indices, tensors), phony


def join(values: Values, phony: Tensor) -> Values:
    """Tie ``values`` to a lane: its Fork runs backward after every gradient of ``values`` was issued.

    When none of them requires a gradient, the first floating-point tensor is made to: the price is one gradient that
    nobody uses (0.1-1.5 % of a forward pass), paid only where numbers of nodes cannot give the order. Values without
    any such tensor, as tokens are, are returned as they are.
    """
    indices = differentiable(values)
    if not indices:
        floating = [index for index, value in enumerate(values) if _can_carry(value)]
        indices = floating[:1]
    if not indices:
        return values
    return replace(values, indices, apply_lane(Join, phony, *(values[index] for index in indices)))


def _can_carry(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
