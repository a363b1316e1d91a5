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

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import GradientEdge

from gpipe_bench.engine.computation import Computation
from gpipe_bench.engine.microbatch import Values, cut, needs_gradient
from gpipe_bench.engine.nodes import apply, check_whole, edge_of, pass_through
from gpipe_bench.engine.transfer import Stream, use_stream, wait_stream

__all__ = ["Slot", "checkpoint"]


class Slot:
    """What Checkpoint and Recompute of one task share: the task, and its graph once it is there."""

    __slots__ = ("_filled", "computation")

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        # Edges at which the graph ends, and leaves at which it begins; None for what needs no gradient.
        self._filled: tuple[list[GradientEdge | None], list[Tensor | None]] | None = None

    def fill(self, inputs: Values, *, again: bool = True) -> Values:
        """Compute with a graph, unless that has been done; ``again`` says whether this is a recomputation."""
        if self._filled is not None:
            return ()
        leaves = cut(inputs)
        task = self.computation
        outputs = task.recompute(leaves) if again else task.forward(leaves, again=True)
        self._filled = (
            [edge_of(value) if needs_gradient(value) else None for value in outputs],
            [value if needs_gradient(value) else None for value in leaves],
        )
        return outputs

    def run_backward(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Empty the slot and run its graph backward: gradients of the outputs to gradients of the inputs."""
        (edges, leaves), self._filled = self._filled or ([], []), None
        pairs = [(edge, grad) for edge, grad in zip(edges, grads, strict=True) if edge is not None and grad is not None]
        del edges
        if pairs:
            roots, theirs = zip(*pairs, strict=True)
            del pairs
            self.computation.observed("backward", torch.autograd.backward, roots, theirs)
        return [None if leaf is None else leaf.grad for leaf in leaves]


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
    """(phony, slot, keep, values...) -> values; with ``keep`` the first pass has a graph, and none is needed later."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, slot: Slot, keep: bool, *values: Any) -> tuple[Any, ...]:
        ctx.slot, ctx.inputs = slot, Saved(ctx, values)
        if keep:
            outputs = slot.fill(values, again=False)
            return pass_through(ctx, outputs, [needs_gradient(value) for value in outputs])
        outputs, needs = slot.computation.first_pass(values)
        return pass_through(ctx, slot.fill(values) if slot.computation.unsure else outputs, needs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        slot: Slot = ctx.slot
        with use_stream(slot.computation.stream):
            slot.fill(ctx.inputs.values(ctx))
            return (None, None, None, *slot.run_backward(grads))


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
