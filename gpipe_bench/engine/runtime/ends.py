"""Where the graph of a cell begins and ends: gradients leave by its inlet, and come in by its outlet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from gpipe_bench.engine.microbatch import Values, differentiable, replace
from gpipe_bench.engine.nodes import apply, edge_of
from gpipe_bench.program import HANDED_OVER_BYTES

__all__ = ["Inlet", "Outlet", "receive"]


class Inlet:
    """Gradients of a cell's inputs, from the cell's own backward pass and from no other.

    A tensor that a layer keeps aside, such as a loss of its own, is no output. A backward pass that begins there comes
    here too, and its gradients would be lost.

    Attributes:
        grads: of the inputs that need one; None until they have arrived.
        is_open: whether the cell's own backward pass is running.
    """

    __slots__ = ("grads", "is_open")

    def __init__(self) -> None:
        self.grads: Sequence[Tensor | None] | None = None
        self.is_open = False


class _Receive(Function):
    """(inlet, phony, [values...]) -> values, which backward keeps no hold of: gradients go to the inlet."""

    @staticmethod
    def forward(ctx: Any, inlet: Inlet, _: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inlet = inlet
        return tuple([value.detach() for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        inlet: Inlet = ctx.inlet
        if not inlet.is_open or inlet.grads is not None:
            raise RuntimeError(
                "with a schedule gradients must come from the pipeline's outputs, got some from a tensor "
                "that a layer keeps aside, or that another layer has from there; return it as an output, or "
                "leave out schedule and backward and use checkpoint='never'"
            )
        inlet.grads = grads
        return (None, None, None)


def receive(values: Values, phony: Tensor) -> tuple[Values, list[int], Inlet]:
    """Flat inputs of a cell as its layers get them, indices of those that need a gradient, and their inlet.

    A leaf of the graph would keep its value alive for as long as the graph, whether the layers need it or not.

    Args:
        values: the inputs.
        phony: a leaf on the device of the cell.
    """
    indices, inlet = differentiable(values), Inlet()
    if not indices:
        return values, indices, inlet
    return replace(values, indices, apply(_Receive, inlet, phony, [values[index] for index in indices])), indices, inlet


class Outlet:
    """The edges at which a cell's backward pass begins. The outputs themselves are not kept.

    A caller of autograd keeps the gradients that it begins with until the backward pass is over, though the last layer
    alone may need them. So one large gradient is handed to a node, which passes it on and forgets it.

    Args:
        outputs: flat outputs of the cell.
    """

    __slots__ = ("_edges", "_handed", "_start")

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._edges: list[GradientEdge | None] = [
            edge_of(value) if isinstance(value, Tensor) and value.requires_grad else None for value in outputs
        ]
        self._handed: list[Tensor] = []
        self._start: Tensor | None = None
        if len(self._edges) - self._edges.count(None) == 1:
            (large,) = (value for value, edge in zip(outputs, self._edges, strict=True) if edge is not None)
            if large.layout == torch.strided and large.nbytes >= HANDED_OVER_BYTES:
                # A layer may have left grad mode off.
                with torch.enable_grad():
                    self._start = apply(_HandOver, self._handed, large)
                self._edges = []

    def roots(self, grads: list[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Edges to begin at, and a gradient for each; those of the outputs are taken out of ``grads``."""
        given = list(grads)
        grads.clear()
        if self._start is not None:
            self._handed.extend([grad for grad in given if grad is not None])
            start, self._start = self._start, None
            return ([edge_of(start)], [start.detach()]) if self._handed else ([], [])
        pairs = [(edge, grad) for edge, grad in zip(self._edges, given, strict=True) if edge and grad is not None]
        self._edges = []
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]


class _HandOver(Function):
    """(gradients, value) -> a phony; backward takes the gradient of the value from the list."""

    @staticmethod
    def forward(ctx: Any, handed: list[Tensor], value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.handed = handed
        return value.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, Tensor]:
        return None, ctx.handed.pop()
