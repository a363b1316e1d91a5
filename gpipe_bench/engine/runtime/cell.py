"""A cell: one micro-batch on one partition, with a graph of its own from its forward to its backward pass.

F   inlet ── layers ── outlet     the graph of a cell, or, if it is checkpointed, its inputs alone
R   inlet ── layers ── outlet     fills a checkpointed cell
B   gradients at the outlet, layers backward, gradients at the inlet
I W the two halves of B, see :mod:`gpipe_bench.autograd.split`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from gpipe_bench.autograd.microbatch import Values, cut, differentiable, versions
from gpipe_bench.autograd.nodes import Inlet, apply, edge_of, get_phony, is_users, nodes_behind, receive
from gpipe_bench.autograd.split import WeightsLater, backward_inputs
from gpipe_bench.engine.computation import Computation
from gpipe_bench.engine.transfer import use_stream


class Outlet:
    """The edges at which a cell's backward pass begins. The outputs themselves are not kept.

    A caller of autograd keeps the gradients that it begins with until the backward pass is over, though the last layer
    alone may need them. So the gradient of a sole output is handed to a node, which passes it on and forgets it.
    """

    __slots__ = ("_edges", "_handed", "_start")

    def __init__(self, outputs: Sequence[Any]) -> None:
        self._edges = [(index, edge_of(outputs[index])) for index in differentiable(outputs)]
        self._handed: list[Tensor] = []
        self._start: Tensor | None = None
        if len(self._edges) == 1:
            ((index, _),) = self._edges
            # A layer may have left grad mode off.
            with torch.enable_grad():
                self._start = apply(_HandOver, self._handed, outputs[index])

    def runs_users_code(self) -> bool:
        """Whether the layers may write to the gradients that they get."""
        return any(is_users(node) for node in nodes_behind([edge.node for _, edge in self._edges]))

    def roots(self, grads: list[Tensor | None]) -> tuple[list[GradientEdge], list[Tensor]]:
        """Edges to begin at, and a gradient for each; those of the outputs are taken out of ``grads``.

        One tensor may leave in several places. Its gradients are added in the order in which the plain module adds
        them, which begins with the last reader: skips come before values, and those of the last readers first.
        """
        pairs = [(edge, grad) for index, edge in reversed(self._edges) if (grad := grads[index]) is not None]
        start, self._start, self._edges = self._start, None, []
        grads.clear()
        if start is not None and pairs:
            ((_, grad),) = pairs
            self._handed.append(grad)
            return [get_gradient_edge(start)], [start.detach()]
        return [edge for edge, _ in pairs], [grad for _, grad in pairs]


class _HandOver(Function):
    """(gradients, value) -> a phony; backward takes the gradient of the value from the list."""

    is_pure_to_gpipe_bench = True

    @staticmethod
    def forward(ctx: Any, handed: list[Tensor], value: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.handed = handed
        return get_phony(value.device).detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor | None) -> tuple[None, Tensor]:
        return None, ctx.handed.pop()


class Cell:
    """Task (i, j) of one batch."""

    __slots__ = ("_checkpointed", "_end", "_inlet", "_later", "_outlet", "_saved", "_splits", "task")

    def __init__(self, task: Computation, *, checkpointed: bool, splits: bool) -> None:
        self.task = task
        self._checkpointed, self._splits = checkpointed, splits
        self._saved: tuple[Values, list[int]] | None = None
        self._inlet: Inlet
        self._outlet: Outlet
        # Where the graph ends, while I may come.
        self._end: Node | None = None
        self._later: WeightsLater | None = None

    def forward(self, flat: Values) -> Values:
        """F: flat outputs, cut off from the graph; each requires a gradient if one will be needed."""
        if not self._checkpointed:
            return cut(self.task.forward(flat, around=self._in_graph))
        self._saved = flat, versions(flat)
        outputs, needs = self.task.first_pass(flat)
        return cut(self.recompute() if self.task.draws.unsure else outputs, needs)

    def recompute(self) -> Values:
        """R: fill a checkpointed cell, unless that has been done; gives its outputs."""
        if self._saved is None:
            return ()
        (flat, before), self._saved = self._saved, None
        if before != versions(flat):
            raise RuntimeError(
                "inputs of a checkpoint must stay as they are until the backward pass, got one modified by an inplace "
                "operation; write to a copy, or later"
            )
        return self.task.recompute(flat, around=self._in_graph)

    def backward(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """B: gradients of the outputs, which are taken out of ``grads``, to gradients of the inputs."""
        self.recompute()
        edges, theirs = self._outlet.roots(grads)
        if not edges:
            return self._inlet.spread(())
        return self._inlet.collect(self.task.observed, "backward", torch.autograd.backward, edges, theirs)

    def backward_inputs(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """I: as :meth:`backward`, but gradients of weights are left to W."""
        self.recompute()
        if self._outlet.runs_users_code():
            # W of the next partition may have noted the same memory.
            with use_stream(self.task.stream):
                grads[:] = [None if grad is None else grad.clone() for grad in grads]
        edges, theirs = self._outlet.roots(grads)
        if not edges:
            return self._inlet.spread(())
        end, self._end = self._end, None
        if end is None:
            self._later = WeightsLater({}, list(zip(edges, theirs, strict=True)))
            return self._inlet.spread(())

        def halve() -> None:
            self._later = backward_inputs(edges, theirs, end, self._inlet.leaf)
            if self._later is None:
                torch.autograd.backward(edges, theirs)

        found = self._inlet.collect(self.task.observed, "backward_inputs", halve)
        if self._later is not None:
            self._later.free_saved()
        return found

    def backward_weights(self) -> None:
        """W: the gradients of the weights."""
        later, self._later = self._later, None
        if later is not None:
            self.task.observed("backward_weights", later.run)

    def _in_graph(self, layers: Callable[[Values], Values], flat: Values) -> Values:
        """Run the layers between an inlet and an outlet."""
        inputs, self._inlet, end = receive(flat)
        # Not in the inlet itself: its node knows the inlet, and Python does not see through the node.
        self._end = end if self._splits else None
        outputs = layers(inputs)
        self._outlet = Outlet(outputs)
        return outputs
