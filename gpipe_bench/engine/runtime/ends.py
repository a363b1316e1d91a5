"""Where the graph of a cell or a loss begins and ends: gradients leave by its inlet, and come in by its outlet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from gpipe_bench.engine.microbatch import Values, differentiable, replace
from gpipe_bench.engine.nodes import apply, edge_of, new_leaf
from gpipe_bench.program import HANDED_OVER_BYTES

__all__ = ["Inlet", "Outlet", "receive"]


class Inlet:
    """Gradients of flat values, from their own backward pass and from no other.

    A tensor that a layer keeps aside, such as a loss of its own, is no output. A backward pass that begins there comes
    here too, and its gradients would be lost.

    Args:
        values: inputs of a cell or a loss.

    Attributes:
        indices: of the values that need a gradient.
    """

    __slots__ = ("_count", "_grads", "_is_open", "indices")

    def __init__(self, values: Values) -> None:
        self.indices, self._count = differentiable(values), len(values)
        self._grads: Sequence[Tensor | None] = ()
        self._is_open = False

    def collect(self, backward: Callable[..., object], *args: Any) -> list[Tensor | None]:
        """Call ``backward(*args)``; gives away the gradients that it brings, one for each value."""
        self._is_open = True
        backward(*args)
        self._is_open = False
        grads, self._grads = self._grads, ()
        return self.spread(grads)

    def spread(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Gradients of all values, from those of the values that need one, or from none."""
        found: list[Tensor | None] = [None] * self._count
        for index, grad in zip(self.indices, grads, strict=False):
            found[index] = grad
        return found

    def take(self, grads: Sequence[Tensor | None]) -> None:
        """Take gradients from autograd."""
        if not self._is_open or self._grads:
            raise RuntimeError(
                "with a schedule gradients must come from the pipeline's outputs, got some from a tensor "
                "that a layer keeps aside, or that another layer has from there; return it as an output, or "
                "leave out schedule and backward and use checkpoint='never'"
            )
        self._grads = grads


class _Receive(Function):
    """(inlet, phony, [values...]) -> values, which backward keeps no hold of: gradients go to the inlet."""

    @staticmethod
    def forward(ctx: Any, inlet: Inlet, _: Tensor, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.inlet = inlet
        return tuple([value.detach() for value in values])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, None]:
        ctx.inlet.take(grads)
        return (None, None, None)


def receive(values: Values) -> tuple[Values, Inlet]:
    """Flat inputs of a cell or a loss as it gets them, and their inlet.

    A leaf of the graph would keep its value alive for as long as the graph, whether the layers need it or not, and
    could not be written to.
    """
    inlet = Inlet(values)
    entering = [values[index] for index in inlet.indices]
    if entering:
        values = replace(values, inlet.indices, apply(_Receive, inlet, new_leaf(entering[0].device), entering))
    return values, inlet


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
