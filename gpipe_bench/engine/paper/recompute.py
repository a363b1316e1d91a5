"""Recompute: the early recomputation of a checkpointed task, see :mod:`gpipe_bench.engine.paper.checkpoint`.

The node stands before the Wait for the gradient. It is made on the copy stream, so autograd lets only that stream wait
for the gradient, while the recomputation itself goes to the compute stream and overlaps the transfer.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from gpipe_bench.engine.microbatch import Values, differentiable, replace
from gpipe_bench.engine.nodes import apply, pass_through
from gpipe_bench.engine.paper.checkpoint import Saved, Slot
from gpipe_bench.engine.streams import Stream, use_stream

__all__ = ["recompute"]


class Recompute(Function):
    """(slot, inputs of the task, x...) -> x...; backward first fills the slot, then passes gradients on."""

    @staticmethod
    def forward(ctx: Any, slot: Slot, inputs: Values, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.slot, ctx.inputs = slot, Saved(ctx, inputs)
        return pass_through(ctx, tensors, (True,) * len(tensors))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        with use_stream(ctx.slot.computation.stream):
            ctx.slot.fill(ctx.inputs.values(ctx))
        return (None, None, *grads)


def recompute(slot: Slot, inputs: Values, outputs: Values, current: Stream) -> Values:
    """Put the recomputation of a task into the way of its gradients.

    Args:
        slot: the task.
        inputs: its flat inputs.
        outputs: its flat outputs, as passed on.
        current: the copy stream on which the gradients arrive, or the compute stream if none.
    """
    indices = differentiable(outputs)
    if not indices:
        return outputs
    with use_stream(current):
        return replace(outputs, indices, apply(Recompute, slot, inputs, *(outputs[index] for index in indices)))
