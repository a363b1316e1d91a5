"""Checkpoint: a task that keeps only its inputs (GPipe, arXiv 1811.06965, section 2.3; torchgpipe, section 3.2.3).

    forward     x ── Checkpoint ──(Wait)── Recompute ── y         Checkpoint runs the partition without a graph
    backward        B(i,j) ◄──(Wait)◄── R(i,j) ◄── gradient       Recompute runs it again with one, into the slot;
                                                                  Checkpoint runs backward through what it finds there

``torch.utils.checkpoint`` does both in one node, so it cannot recompute before the gradient has arrived. Without
Recompute, Checkpoint recomputes by itself when the gradient has arrived.

Recompute stands before the Wait for the gradient. It is made on the copy stream, so autograd lets only that stream wait
for the gradient, while the recomputation itself goes to the compute stream and overlaps the transfer.

Guard is the first node of the backward pass of a batch with checkpoints. It refuses what checkpoints cannot give.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from gpipe_bench.autograd.microbatch import Values, cut, needs_gradient
from gpipe_bench.autograd.nodes import Inlet, apply, check_whole, edge_of, pass_through, receive
from gpipe_bench.engine.computation import Computation
from gpipe_bench.engine.transfer import Stream, use_stream, wait_stream

__all__ = ["Slot", "checkpoint"]


class Slot:
    """What Checkpoint and Recompute of one task share: the task, and its graph once it is there."""

    __slots__ = ("_edges", "_inlet", "_leaves", "computation")

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        # Where the graph ends; None for what needs no gradient.
        self._edges: list[GradientEdge | None] | None = None
        # Where it begins: at an inlet if layers may write to their inputs, else at leaves, as torchgpipe has it. A leaf
        # copies a gradient that somebody else holds.
        self._inlet: Inlet
        self._leaves: list[Tensor | None] = []

    def fill(self, inputs: Values) -> Values:
        """Recompute with a graph, and give the outputs, unless that has been done."""
        if self._edges is not None:
            return ()
        leaves = cut(inputs)
        outputs = self.computation.recompute(leaves)
        self._leaves = [value if needs_gradient(value) else None for value in leaves]
        self._edges = _edges(outputs)
        return outputs

    def run_backward(self, grads: Sequence[Tensor | None], *, keep_graph: bool = False) -> list[Tensor | None]:
        """Run the graph backward, from gradients of the outputs to those of the inputs; what gets none does not run.

        Those of one tensor are added in the order of the plain module, as in a cell of the runtime: the last one first.
        """
        edges = self._edges or []
        if not keep_graph:
            self._edges = None
        both = zip(edges[::-1], grads[::-1], strict=True)
        pairs = [(edge, grad) for edge, grad in both if edge is not None and grad is not None]
        del edges, both
        leaves, self._leaves = self._leaves, []
        if not pairs:
            return [None] * len(leaves) if leaves else self._inlet.spread(())
        roots, theirs = zip(*pairs, strict=True)
        del pairs
        backward = partial(torch.autograd.backward, retain_graph=keep_graph)
        if not leaves:
            return self._inlet.collect(self.computation.observed, "backward", backward, roots, theirs)
        self.computation.observed("backward", backward, roots, theirs)
        return [None if leaf is None else leaf.grad for leaf in leaves]

    def in_graph(self, layers: Callable[[Values], Values], values: Values) -> Values:
        """Run layers with a graph that stays until the backward pass; they may write to their inputs."""
        inputs, self._inlet, _ = receive(cut(values))
        outputs = layers(inputs)
        self._edges = _edges(outputs)
        return outputs


def _edges(outputs: Values) -> list[GradientEdge | None]:
    return [edge_of(value) if needs_gradient(value) else None for value in outputs]


class Saved:
    """Inputs in the hands of autograd, which raises if they are written to before the backward pass."""

    def __init__(self, ctx: Any, values: Values) -> None:
        ctx.save_for_backward(*[value for value in values if isinstance(value, Tensor)])
        self._rest = [None if isinstance(value, Tensor) else (value,) for value in values]

    def values(self, ctx: Any) -> Values:
        """The inputs."""
        tensors = iter(ctx.saved_tensors)
        return tuple([next(tensors) if rest is None else rest[0] for rest in self._rest])


class Checkpoint(Function):
    """(phony, slot, keep, values...) -> values; with ``keep`` the task is computed once, and its activations stay."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, slot: Slot, keep: bool, *values: Any) -> tuple[Any, ...]:
        ctx.slot, ctx.keep, ctx.count = slot, keep, len(values)
        # With a phony instead of inputs autograd still refuses to run backward through a graph that it has freed.
        ctx.inputs = Saved(ctx, (phony,) if keep else values)
        if keep:
            outputs = slot.computation.forward(values, around=slot.in_graph)
            return pass_through(ctx, outputs, [needs_gradient(value) for value in outputs])
        outputs, needs = slot.computation.first_pass(values)
        return pass_through(ctx, slot.fill(values) if slot.computation.draws.unsure else outputs, needs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        slot: Slot = ctx.slot
        count: int = ctx.count
        # An edge of order alone leads here where the loss uses no output of the task.
        if all(grad is None for grad in grads):
            return (None,) * (3 + count)
        inputs = ctx.inputs.values(ctx)
        with use_stream(slot.computation.stream):
            if not ctx.keep:
                slot.fill(inputs)
            # Activations stay for as long as the caller's graph. Nodes of torch.compile ask the same, for want of a
            # public name.
            keep_graph = ctx.keep and torch._C._autograd._get_current_graph_task_keep_graph()  # noqa: SLF001 - see above
            return (None, None, None, *slot.run_backward(grads, keep_graph=keep_graph))


def checkpoint(slot: Slot, values: Values, edge: Tensor, *, keep: bool = False) -> Values:
    """Compute a task as one node; ``edge`` keeps it in the graph when no input does, ``keep`` keeps its activations."""
    with use_stream(slot.computation.stream), torch.enable_grad():
        outputs: Values = apply(Checkpoint, edge, slot, keep, *values)
    return outputs


class Recompute(Function):
    """(slot, inputs of the task, x...) -> x...; backward first fills the slot, then passes gradients on."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, inputs: Values, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slot, ctx.inputs = slot, Saved(ctx, inputs)
        return pass_through(ctx, tensors, (True,) * len(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        # Leaves of the graph belong to the stream on which they are made.
        if any(grad is not None for grad in grads):
            with use_stream(ctx.slot.computation.stream):
                ctx.slot.fill(ctx.inputs.values(ctx))
        return (None, None, *grads)


class Guard(Function):
    """([(a partition's own compute stream, the caller's stream on its device)], values...) -> values, of a batch.

    Backward it makes compute streams that partitions have of their own wait for the caller's: recomputation waits for
    no gradient, and would be given memory that the caller has freed and still uses.
    """

    @staticmethod
    def forward(ctx: Any, streams: Sequence[tuple[Stream, Stream]], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.streams = streams
        return pass_through(ctx, values, (True,) * len(values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        check_whole("a checkpoint", "checkpoint='never'")
        for own, callers in ctx.streams:
            wait_stream(own, callers)
        return (None, *grads)
