"""Checkpointing with early recomputation (GPipe, arXiv 1811.06965, section 2.3; torchgpipe, section 3.2.3).

Two autograd functions share a slot:

    forward     x ── Checkpoint ──(Wait)── Recompute ── y         Checkpoint runs the partition without a graph
    backward        B(i,j) ◄──(Wait)◄── R(i,j) ◄── gradient       Recompute runs it again with one, into the slot;
                                                                  Checkpoint runs backward through what it finds there

Recompute stands before the Wait for the gradient. It is made on the copy stream, so autograd lets only that stream
wait for the gradient, while the recomputation itself goes to the compute stream and overlaps the transfer.
``torch.utils.checkpoint`` does both in one node and cannot. Without Recompute, Checkpoint recomputes by itself, when
the gradient has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpipe_bench.engine.ahead import Early
from gpipe_bench.engine.ambience import Ambience
from gpipe_bench.engine.autograd import apply, apply_lane, pass_through, run_backward
from gpipe_bench.engine.flags import is_checkpointing, is_recomputing
from gpipe_bench.engine.microbatch import Values, differentiable, replace
from gpipe_bench.engine.observer import Observer, Task, observed
from gpipe_bench.engine.phony import get_phony, new_leaf
from gpipe_bench.engine.randomness import Draws
from gpipe_bench.engine.streams import Stream, use_stream, wait_stream

__all__ = ["Slot", "check_whole", "checkpoint", "fill", "guard", "is_checkpointing", "is_recomputing", "recompute"]

Recomputed = tuple[Values, Values]


@dataclass(slots=True)
class Slot:
    """What the two functions of one task share.

    Attributes:
        run: computes the partition: flat values in, flat values out.
        ambience: the modes of the forward pass, for the recomputation.
        draws: the random numbers of the forward pass, for the recomputation.
        task: names the task by kind, for the observer.
        device: where it runs.
        stream: its compute stream.
        observer: told of recomputation and backward pass.
        early: where no node recomputes the task ahead of its gradient, what does it instead.
        recomputed: (outputs with graph, inputs that collect gradients), from recomputation to backward pass.
    """

    run: Callable[[Values], Values]
    ambience: Ambience
    draws: Draws
    task: Callable[[str], Task]
    device: torch.device
    stream: Stream
    observer: Observer | None
    early: Early | None = None
    recomputed: Recomputed | None = field(default=None, init=False)

    def first_pass(self, values: Values) -> Values:
        """Compute without a graph."""
        with self.ambience.applied(checkpointing=True), self.draws.first_pass():
            return self.run(values)

    def fill(self, values: Values) -> None:
        """Compute again, with a graph, the same random numbers and the same modes."""
        leaves = tuple([_leaf(value) for value in values])
        self.recomputed = observed(self.observer, self.task, ("recompute",), self._again, leaves), leaves

    def _again(self, leaves: Values) -> Values:
        with self.ambience.applied(recomputing=True), self.draws.replay():
            return self.run(leaves)

    def take(self) -> Recomputed | None:
        """Empty the slot."""
        recomputed, self.recomputed = self.recomputed, None
        return recomputed


class Checkpoint(Function):
    """(phony, slot, values...) -> values, computed without a graph."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, slot: Slot, *values: Any) -> tuple[Any, ...]:
        ctx.slot = slot
        if slot.early is not None:
            slot.early.made(ctx)
        _save(ctx, values)
        return pass_through(ctx, slot.first_pass(values))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        slot: Slot = ctx.slot
        with use_stream(slot.stream):
            if slot.early is not None:
                slot.early.catch_up()
            fill(ctx)
            outputs, leaves = slot.take() or ((), ())
            roots = [output if isinstance(output, Tensor) and output.requires_grad else None for output in outputs]
            observed(slot.observer, slot.task, ("backward",), run_backward, roots, grads)
        if slot.early is not None:
            slot.early.finished()
        return (None, None, *[leaf.grad if isinstance(leaf, Tensor) else None for leaf in leaves])


class Recompute(Function):
    """(slot, inputs of the task, values...) -> values; backward first fills the slot, then passes gradients on.

    The last value may be a phony: then this is a Fork too (see :mod:`gpipe_bench.engine.dependency`).
    """

    @staticmethod
    def forward(ctx: Any, slot: Slot, inputs: Values, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.slot = slot
        _save(ctx, inputs)
        return pass_through(ctx, values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        slot: Slot = ctx.slot
        with use_stream(slot.stream):
            if slot.early is not None:
                slot.early.catch_up(outranking=True)
            slot.fill(_saved(ctx))
        return (None, None, *grads)


class Guard(Function):
    """(streams, values...) -> values, the outputs of a batch with checkpoints; refuses what would miss gradients.

    Backward it is the first node. It makes compute streams that partitions have of their own wait for the caller's:
    recomputation waits for no gradient, and would be given memory that the caller has freed and still uses.
    """

    @staticmethod
    def forward(ctx: Any, streams: Sequence[tuple[Stream, Stream]], *values: Tensor) -> tuple[Tensor, ...]:
        ctx.streams = streams
        return pass_through(ctx, values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        check_whole("a checkpoint", "checkpoint='never'")
        for own, callers in ctx.streams:
            wait_stream(own, callers)
        return (None, *grads)


def check_whole(what: str, instead: str) -> None:
    """Within a backward pass, check that it is one that computes gradients of all parameters, once.

    Args:
        what: what needs it to be so.
        instead: what to use otherwise.

    Raises:
        RuntimeError: second derivatives or gradients of some tensors only are asked for.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(f"second derivatives must not pass through {what}, got create_graph=True; use {instead}")
    # Parameters are no inputs of such nodes. torch.utils.checkpoint asks the same, unannotated, function.
    if not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]  # noqa: SLF001 - as it does
        raise RuntimeError(
            f"gradients through {what} must go to all parameters, got autograd.grad() or backward(inputs=...); call "
            f"backward() without inputs=, or use {instead}"
        )


def guard(values: Values, streams: Sequence[tuple[Stream, Stream]]) -> Values:
    """Outputs of a batch with checkpoints that raise when a backward pass asks for what checkpoints cannot give.

    Args:
        values: the outputs.
        streams: (a partition's own compute stream, the caller's stream on its device), where it has one.
    """
    indices = differentiable(values)
    if not indices:
        return values
    return replace(values, indices, apply(Guard, streams, *(values[index] for index in indices)))


def checkpoint(slot: Slot, values: Values, phony: Tensor | None) -> Values:
    """Compute a task and keep only its inputs.

    Args:
        slot: the task.
        values: flat inputs.
        phony: end of a lane to hang on the task, or None.
    """
    edge = new_leaf(slot.device) if phony is None else phony
    return apply(Checkpoint, edge, slot, *values)


def recompute(
    slot: Slot, inputs: Values, outputs: Values, current: Stream, *, fork: bool
) -> tuple[Values, Tensor | None]:
    """Put the recomputation of a task into the way of its gradients.

    Args:
        slot: the task.
        inputs: its flat inputs.
        outputs: its flat outputs, as passed on.
        current: the copy stream on which the gradients arrive, or the compute stream if none.
        fork: whether to open a lane at the same node.

    Returns:
        The outputs, and the phony of the lane, if any.
    """
    indices = differentiable(outputs)
    if not indices:
        return outputs, None
    values = [outputs[index] for index in indices]
    if fork:
        values.append(get_phony(values[0].device))
    with use_stream(current):
        passed = apply_lane(Recompute, slot, inputs, *values)
    return (replace(outputs, indices, passed[: len(indices)]), passed[-1] if fork else None)


def _save(ctx: Any, values: Values) -> None:
    ctx.save_for_backward(*[value for value in values if isinstance(value, Tensor)])
    ctx.rest = [None if isinstance(value, Tensor) else (value,) for value in values]


def _saved(ctx: Any) -> Values:
    tensors = iter(ctx.saved_tensors)
    return tuple([next(tensors) if rest is None else rest[0] for rest in ctx.rest])


def fill(ctx: Any) -> None:
    """Recompute the task of a checkpoint's node, unless that has been done."""
    if ctx.slot.recomputed is None:
        ctx.slot.fill(_saved(ctx))


def _leaf(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.detach().requires_grad_(value.requires_grad)
