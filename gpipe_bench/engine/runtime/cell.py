"""A cell: one micro-batch on one partition, with a graph of its own from its forward to its backward pass.

F   inlet ── layers ── outlet     the graph of a cell, or, if it is checkpointed, its inputs alone
R   inlet ── layers ── outlet     fills a checkpointed cell
B   gradients at the outlet, layers backward, gradients at the inlet
I W the two halves of B, see :mod:`gpipe_bench.engine.runtime.split`
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from gpipe_bench.engine.computation import Computation
from gpipe_bench.engine.microbatch import Values, version
from gpipe_bench.engine.nodes import edge_of
from gpipe_bench.engine.runtime.ends import Inlet, Outlet, receive
from gpipe_bench.engine.runtime.split import WeightsLater, backward_inputs
from gpipe_bench.engine.streams import use_stream

__all__ = ["Cell", "cut"]


class Cell:
    """Task (i, j) of one batch.

    Args:
        task: computes it.
        checkpointed: whether it keeps only its inputs.
        splits: whether its backward pass is cut into I and W.
    """

    __slots__ = (
        "_checkpointed",
        "_edges",
        "_inlet",
        "_later",
        "_outlet",
        "_saved",
        "_splits",
        "task",
    )

    def __init__(self, task: Computation, *, checkpointed: bool, splits: bool) -> None:
        self.task = task
        self._checkpointed, self._splits = checkpointed, splits
        self._saved: tuple[Values, list[int]] | None = None
        self._inlet: Inlet
        self._outlet: Outlet
        self._edges: list[GradientEdge] = []
        self._later: WeightsLater | None = None

    def forward(self, flat: Values) -> Values:
        """F: flat outputs, cut off from the graph; each requires a gradient if one will be needed."""
        if not self._checkpointed:
            return cut(self.task.forward(flat, around=self._in_graph))
        self._saved = flat, _versions(flat)
        outputs = self.task.first_pass(flat)
        # As torch.utils.checkpoint has it, everything that can have a gradient counts as needing one.
        return tuple([value.detach().requires_grad_() if _carries(value) else value for value in outputs])

    def recompute(self) -> None:
        """R: fill a checkpointed cell, unless that has been done.

        Raises:
            RuntimeError: the inputs were written to since F.
        """
        if self._saved is None:
            return
        (flat, versions), self._saved = self._saved, None
        if versions != _versions(flat):
            raise RuntimeError(
                "inputs of a checkpoint must stay as they are until the backward pass, got one modified by an inplace "
                "operation; write to a copy, or later"
            )
        self.task.recompute(flat, around=self._in_graph)

    def backward(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """B: gradients of the outputs, which are taken out of ``grads``, to gradients of the inputs."""
        self.recompute()
        edges, theirs = self._outlet.roots(grads)
        return self._whole("backward", edges, theirs) if edges else self._inlet.spread(())

    def backward_inputs(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """I: as :meth:`backward`, but gradients of weights are left to W."""
        self.recompute()
        edges, theirs = self._outlet.roots(grads)
        if not edges:
            return self._inlet.spread(())
        if not self._edges:
            self._later = WeightsLater({}, list(zip(edges, theirs, strict=True)))
            return self._inlet.spread(())
        with use_stream(self.task.stream):
            split = self.task.observed("backward_inputs", backward_inputs, edges, theirs, self._edges)
        if split is None:
            return self._whole("backward_inputs", edges, theirs)
        self._edges = []
        found, self._later = split
        return self._inlet.spread(found)

    def backward_weights(self) -> None:
        """W: the gradients of the weights."""
        later, self._later = self._later, None
        if later is not None:
            with use_stream(self.task.stream):
                self.task.observed("backward_weights", later.run)

    def _in_graph(self, layers: Callable[[Values], Values], flat: Values) -> Values:
        """Run the layers between an inlet and an outlet."""
        inputs, self._inlet = receive(flat)
        if self._splits:
            # Not in the inlet itself: its node knows the inlet, and Python does not see through the node.
            self._edges = [edge_of(inputs[index]) for index in self._inlet.indices]
        outputs = layers(inputs)
        self._outlet = Outlet(outputs)
        return outputs

    def _whole(self, kind: str, edges: Sequence[GradientEdge], grads: Sequence[Tensor]) -> list[Tensor | None]:
        """All of the backward pass; gives the gradients of the inputs, of which the cell keeps no hold until W."""
        with use_stream(self.task.stream):
            return self._inlet.collect(self.task.observed, kind, torch.autograd.backward, edges, grads)


def cut(values: Sequence[Any]) -> Values:
    """``values`` as leaves, each of which requires a gradient if the value does."""
    return tuple(
        [value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in values]
    )


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _versions(values: Values) -> list[int]:
    return [version(value) for value in values if isinstance(value, Tensor)]
