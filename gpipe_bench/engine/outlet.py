"""Where the graph of a task ends with ``backward='scheduled'``, and gradients of its outputs come in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gpipe_bench.engine.autograd import apply, run_backward
from gpipe_bench.engine.keeping import is_dense
from gpipe_bench.engine.microbatch import differentiable
from gpipe_bench.program import HANDED_OVER_BYTES

__all__ = ["Outlet", "outlet_of", "run_backward_from"]

Edges = list[GradientEdge | None]


class HandOver:
    """The end of a graph with one large gradient, of which nobody keeps hold.

    Whoever calls autograd keeps the gradients that he begins with until it is done, though the task may need them for
    its last layer only. So this one is handed to a node, which passes it on and forgets it.

    Args:
        value: the task's output that needs a gradient.
    """

    __slots__ = ("_handed", "_start")

    def __init__(self, value: Tensor) -> None:
        self._handed: list[Tensor] = []
        # A layer may have left grad mode off.
        with torch.enable_grad():
            (self._start,) = apply(_Hand, self._handed, value)

    def run_backward(self, grads: list[Tensor | None]) -> None:
        """Take the gradient out of ``grads`` and run backward."""
        self._handed.extend([grad for grad in grads if grad is not None])
        grads.clear()
        run_backward((self._start,), (self._start.detach(),))


Outlet = Edges | HandOver
"""Where gradients of a task's outputs come in. The outputs themselves are not kept."""


def outlet_of(values: Sequence[Any], *, hands_over: bool = True) -> Outlet:
    """The outlet of a task.

    Args:
        values: its flat outputs; what needs no gradient has no edge.
        hands_over: whether a large gradient may be handed over: no nodes are made within a backward pass.
    """
    edges = [
        get_gradient_edge(value) if isinstance(value, Tensor) and value.requires_grad else None for value in values
    ]
    # One node for several would also run those of outputs that get no gradient.
    if hands_over and len(edges) - edges.count(None) == 1:
        value = values[0] if len(values) == 1 else values[differentiable(values)[0]]
        if value.numel() * value.element_size() >= HANDED_OVER_BYTES and is_dense([value]):
            return HandOver(value)
    return edges


def run_backward_from(outlet: Outlet, grads: list[Tensor | None]) -> None:
    """The backward pass of a task.

    Args:
        outlet: where it begins.
        grads: of the outputs; that which is handed over is taken out.
    """
    if isinstance(outlet, list):
        run_backward(outlet, grads)
    else:
        outlet.run_backward(grads)


class _Hand(Function):
    """(gradients, value) -> a phony; backward takes the gradient of the value from the list."""

    @staticmethod
    def forward(ctx: Any, handed: list[Tensor], value: Tensor) -> tuple[Tensor]:
        ctx.set_materialize_grads(False)
        ctx.handed = handed
        return (value.new_empty(0),)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, Tensor]:
        return None, ctx.handed.pop()
