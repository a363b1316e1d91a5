"""Traces the two parts of a layer's backward pass, as the engine cuts it: I and W.

    block 0..k-1 ─ Inlet ─ layer ─ Exit        I ends at the inlet; gradients are noted where weights branch off
                                               W begins at these nodes, and runs into the weights alone

The cut is that of :mod:`gpipe_bench.engine.runtime.split`. Its two calls of autograd are made below PyTorch's Python
functions, under which modes would not see what runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge, Node

from gpipe_bench.collection import no_collection
from gpipe_bench.engine.runtime.split import branching, reaching
from gpipe_bench.simulator.tracing.accelerator import accelerator_kernels
from gpipe_bench.simulator.tracing.layer_trace import LayerTracing, give_gradients
from gpipe_bench.simulator.tracing.operations import tensors_of
from gpipe_bench.simulator.tracing.specs import TensorSpec, flat
from gpipe_bench.simulator.tracing.steps import NO_BLOCK, SplitTrace
from gpipe_bench.skip.namespace import SkipKey

__all__ = ["trace_split"]

_Grads = tuple[Tensor | None, ...]


def trace_split(
    layer: nn.Module,
    inputs: object,
    skips: dict[SkipKey, TensorSpec | None],
    wanted: Sequence[bool] | None,
    held: Sequence[bool],
) -> SplitTrace:
    """Trace I and W of a layer, of which some input needs a gradient.

    The arguments are those of :func:`.layer_trace.trace_layer`, and for each tensor that leaves, whether W of a later
    layer keeps the nodes that made it (``held``).
    """
    give_gradients(layer)
    with no_collection():
        return _SplitTracing(layer, inputs, skips).split(wanted, held)


class _Inlet(torch.autograd.Function):
    """(phony, tensors) -> these tensors, as outputs of one node; it never runs backward."""

    @staticmethod
    def forward(ctx: Any, _phony: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor | None) -> tuple[None, None]:
        return None, None


class _SplitTracing(LayerTracing):
    """The pass with graph, then I and W."""

    def __init__(self, layer: nn.Module, inputs: object, skips: dict[SkipKey, TensorSpec | None]) -> None:
        super().__init__(layer, inputs, skips, ())
        tensors = [spec.empty() for spec in self.input_specs]
        for tensor in tensors:
            self.recorder.adopt(tensor)
        self._leading = [place for place, spec in enumerate(self.input_specs) if spec.requires_grad]
        phony = torch.empty(0, device="meta", requires_grad=True)
        entered = _Inlet.apply(phony, [tensors[place] for place in self._leading])  # type: ignore[no-untyped-call]  # PyTorch's
        self._end: Node = entered[0].grad_fn
        for place, tensor in zip(self._leading, entered, strict=True):
            tensors[place] = tensor
        self._waiting = tensors[::-1]
        self._arrived: dict[Node, _Grads] = {}

    def _enter(self, spec: TensorSpec) -> Tensor:
        tensor = self._waiting.pop()
        return tensor.view_as(tensor) if spec.requires_grad and spec.view else tensor

    def split(self, wanted: Sequence[bool] | None, held: Sequence[bool]) -> SplitTrace:
        """Run both parts; see :func:`trace_split`."""
        recorder = self.recorder
        output, stashed = self._forward()
        leaving = tensors_of([*flat(output), *stashed.values()])
        asked = [True] * len(leaving) if wanted is None else wanted
        roots = [self._exit(tensor) if ask else None for tensor, ask in zip(leaving, asked, strict=True)]
        del output, stashed, leaving
        recorder.take()
        recorder.accumulate(parameter.grad for parameter in self.layer.parameters())
        edges = [root for root in roots if root is not None]
        staying = [root.node for root, stays in zip(roots, held, strict=True) if root is not None and stays]
        branches = self._branches([edge.node for edge in edges])
        if branches is None:
            return SplitTrace(whole=True)
        found = self._run_inputs(edges, list(branches))
        inputs = recorder.take()
        holds, arrived = self._held([*branches, *staying]), tuple(map(recorder.block, self._spread(found)))
        before = recorder.alive()
        made = iter(self.made)
        gradients = tuple(NO_BLOCK if root is None else next(made) for root in roots)
        del roots, edges
        released = before - recorder.alive()
        del found
        kept = recorder.alive()
        recorder.take()
        self._run_weights(branches)
        weights = recorder.take()
        self._arrived.clear()
        del branches, staying
        return SplitTrace(
            inputs=inputs,
            weights=weights,
            ending=recorder.take(),
            released=tuple(sorted(released)),
            kept=tuple(sorted(kept)),
            output_gradients=gradients,
            input_gradients=arrived,
            holds=holds,
        )

    def _branches(self, nodes: Sequence[Node]) -> dict[Node, list[Tensor]] | None:
        """The nodes at which W begins, and their weights; None if the backward pass is not cut."""
        reaches = reaching(nodes, self._end)
        return branching(reaches, self._end, []) if all(reaches[node] for node in nodes) else None

    def _run_inputs(self, edges: Sequence[GradientEdge], branches: Sequence[Node]) -> _Grads:
        """I: the gradients of the inputs that need one."""
        if not edges:
            return (None,) * len(self._leading)
        handles = [node.register_prehook(partial(self._note, node)) for node in branches]
        inputs = [GradientEdge(self._end, index) for index in range(len(self._leading))]
        ones = [torch.ones((), device="meta") for _ in edges]
        found = self._run_backward(edges, ones, inputs, keeps_graph=True, accumulates=False)
        for handle in handles:
            handle.remove()
        return found

    def _note(self, node: Node, grads: _Grads) -> None:
        self._arrived[node] = grads

    def _run_weights(self, branches: dict[Node, list[Tensor]]) -> None:
        """W: the gradients of the weights, from the nodes to which gradients came."""
        for node, grads in self._arrived.items():
            there = [(GradientEdge(node, index), grad) for index, grad in enumerate(grads) if grad is not None]
            if there:
                handle = node.register_prehook(partial(_instead, grads))
                edges, theirs = zip(*there, strict=True)
                self._run_backward(edges, theirs, branches[node], keeps_graph=False, accumulates=True)
                handle.remove()

    def _run_backward(
        self, edges: Sequence[GradientEdge], grads: Sequence[Tensor], inputs: Sequence[Any], **how: bool
    ) -> _Grads:
        with self.recorder, accelerator_kernels():
            found: _Grads = Variable._execution_engine.run_backward(  # noqa: SLF001 - see above
                tuple(edges),
                tuple(grads),
                how["keeps_graph"],
                False,
                tuple(inputs),
                allow_unreachable=True,
                accumulate_grad=how["accumulates"],
            )
        return found

    def _spread(self, found: _Grads) -> list[Tensor | None]:
        """The gradient of each input."""
        places = dict(zip(self._leading, found, strict=True))
        return [places.get(place) for place in range(len(self.input_specs))]

    def _held(self, nodes: Sequence[Node]) -> tuple[bool, ...]:
        """Of each input, whether one of the nodes leads to it."""
        reached: set[int] = set()
        seen: set[Node] = set(nodes)
        todo = list(nodes)
        while todo:
            for child, index in todo.pop().next_functions:
                if child is self._end:
                    reached.add(index)
                elif child is not None and child not in seen:
                    seen.add(child)
                    todo.append(child)
        places = {place for index, place in enumerate(self._leading) if index in reached}
        return tuple(place in places for place in range(len(self.input_specs)))


def _instead(grads: _Grads, _: _Grads) -> _Grads:
    return grads
