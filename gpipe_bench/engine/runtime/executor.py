"""The runtime's executor: a schedule orders both passes, and each task has a graph of its own.

``step`` runs all actions at once. ``pipe(x)`` and ``loss.backward()`` need three nodes in the caller's graph:

    inputs ── Enter ── phony ── Drive ── phony ── Collect ── outputs

Backward, Collect takes the gradients of all outputs, Drive runs all actions but F, and Enter hands out the gradients of
the inputs. Collect and Enter are nodes of their devices, so autograd orders their streams. Drive is one of the CPU,
which autograd runs in the thread that called ``backward()``: the thread of a device must stay free, since the backward
passes of the cells need it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpipe_bench.autograd.microbatch import MicroBatch, Values, differentiable
from gpipe_bench.autograd.nodes import Inlet, apply, check_whole, get_phony, new_leaf, receive
from gpipe_bench.engine.goal import Goal, check_loss
from gpipe_bench.engine.pipeline import Batch, BatchContext
from gpipe_bench.engine.randomness import Draws
from gpipe_bench.engine.runtime.lists import ActionLists, ScheduleLike, action_lists
from gpipe_bench.engine.runtime.mailboxes import Mailboxes
from gpipe_bench.engine.runtime.runtime import Runtime
from gpipe_bench.engine.tied import Copy
from gpipe_bench.engine.transfer import Stream, current_stream, use_stream, wait_stream
from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.program import Plan
from gpipe_bench.skip.layout import SkipCopy

__all__ = ["RuntimeExecutor"]

_CPU = torch.device("cpu")


class RuntimeExecutor:
    """Runs batches by a schedule.

    Args:
        schedule: see :class:`gpipe_bench.GPipe`.
        devices: one per partition.
        ranks: for each partition its device of the schedule.
    """

    def __init__(self, schedule: ScheduleLike, devices: Sequence[torch.device], ranks: Sequence[int]) -> None:
        self._schedule, self._devices, self._rank_count = schedule, list(devices), max(ranks, default=0) + 1
        self._lists: dict[tuple[int, int, bool], ActionLists] = {}

    def lists(self, plan: Plan[SkipCopy]) -> ActionLists:
        """The actions of a batch."""
        key = m, checkpointed, early = plan.m, plan.checkpointed, plan.components.early_recompute
        if key not in self._lists:
            options: Any = {"m": m, "checkpointed": checkpointed, "early_recompute": early}
            self._lists[key] = action_lists(self._schedule, self._devices, self._rank_count, **options)
        return self._lists[key]

    def forward(self, batch: Batch, mailboxes: Mailboxes | None = None) -> Any:
        """Run the forward passes of a schedule; the backward pass follows in ``loss.backward()``.

        Args:
            batch: its micro-batches, if the first partition is in this process.
            mailboxes: how values travel; default: within this process.

        Raises:
            ScheduleError: the schedule begins its backward passes before that.
        """
        plan, lists, mailboxes = batch.plan, self.lists(batch.plan), mailboxes or Mailboxes()
        if plan.backward and not lists.facts.schedule.forwards_first:
            rule = "schedule must end its forward passes before it begins its backward passes for pipe(x)"
            advice = "call pipe.step(input, target, loss), or pipe(x) under torch.no_grad()"
            raise ScheduleError([f"{rule}, got {lists.name}; {advice}"])
        end = Outputs(plan.m)
        with batch.context(whole=False) as context:
            order = mailboxes.enter(context.randomness, lists.forward)
            options: Any = {"learning": plan.backward, "mailboxes": mailboxes}
            runtime = Runtime(list(batch.microbatches), context, lists, end, **options)
            runtime.run(order)
            outputs, end.microbatches = end.microbatches, []
            batch.order_streams(outputs, entering=False)
            mailboxes.leave(context.randomness)
        if plan.backward:
            backward_pass = BackwardPass(runtime, end, batch.streams, context.copies.leaves if context.copies else ())
            outputs = attach(backward_pass, batch.microbatches, outputs)
        return batch.gather(outputs).unwrap()

    def step(self, batch: Batch, goal: Goal | None, mailboxes: Mailboxes | None = None) -> tuple[Tensor, Any]:
        """Run all actions of a schedule, backward ones where the plan says so. Empties the micro-batches.

        Args:
            batch: its micro-batches, if the first partition is in this process.
            goal: what to minimise, if the last partition is in this process.
            mailboxes: how values travel; default: within this process.
        """
        plan, lists, mailboxes = batch.plan, self.lists(batch.plan), mailboxes or Mailboxes()
        shared: Any = goal.shared(batch.chunks, batch.sizes, learning=plan.backward) if goal else (None, [], ())
        loss, targets, shares = shared
        keeps = goal is not None and goal.return_output
        entering = [value for microbatch in batch.microbatches for value in microbatch.values]
        with batch.context(whole=False) as context:
            order = mailboxes.enter(context.randomness, lists.facts.order if plan.backward else lists.forward)
            end = Losses(loss, targets, shares, context, keeps=keeps)
            options: Any = {"learning": plan.backward, "mailboxes": mailboxes}
            runtime = Runtime(batch.microbatches, context, lists, end, **options)
            batch.microbatches.clear()
            try:
                runtime.run(order)
                total = mailboxes.leave(context.randomness, end.total)
            finally:
                # The loss has been made on the stream of the last partition: the caller comes after it, too.
                after(batch.streams)
            tied = mailboxes.tied_grads(context.copies) if context.copies and plan.backward else []
        grads = [grad for each in runtime.input_grads for grad in each]
        pairs = [(value, grad) for value, grad in zip(entering, grads, strict=False) if grad is not None]
        pairs += [(weight, grad) for weight, grad in tied if grad is not None]
        if pairs:
            torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
        return total, batch.gather(end.outputs).unwrap() if keeps else None


class Outputs:
    """The end of a pipeline with m micro-batches whose loss the caller computes."""

    def __init__(self, m: int) -> None:
        self.microbatches = [MicroBatch((), None)] * m
        self.given: list[list[Tensor | None]] = [[] for _ in range(m)]

    def take(self, i: int, microbatch: MicroBatch) -> None:
        """Keep the outputs of micro-batch i."""
        self.microbatches[i] = microbatch

    def grads(self, i: int) -> list[Tensor | None]:
        """Give away the gradients that the caller's backward pass has brought."""
        grads, self.given[i] = self.given[i], []
        return grads


class Losses:
    """Computes losses and their gradients, on the compute stream of the last partition.

    Attributes:
        outputs: of the micro-batches, without a graph, if they are kept.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Tensor],
        targets: Sequence[Any],
        shares: Sequence[float],
        batch: BatchContext,
        *,
        keeps: bool,
    ) -> None:
        self.outputs = [MicroBatch((), None)] * len(targets)
        self._loss, self._targets, self._shares = loss, list(targets), shares
        self._execution, self._stream, self._keeps = batch.execution, batch.streams[-1][0].computing, keeps
        self._turns, self._j, self._randomness = batch.turns, len(batch.partitions), batch.randomness
        self._values: list[Tensor | None] = [None] * len(targets)
        # Losses with their graph, and where the gradients of the outputs arrive, until the backward pass.
        self._open: dict[int, tuple[Tensor | None, Inlet]] = {}

    def take(self, i: int, microbatch: MicroBatch) -> None:
        """Compute the loss of micro-batch i, if it counts."""
        target, self._targets[i] = self._targets[i], None
        with use_stream(self._stream), self._execution.applied():
            values, inlet, _ = receive(microbatch.values)
            loss = None
            if self._shares[i]:
                output = MicroBatch(values, microbatch.structure).unwrap()
                draws = Draws(self._randomness, i, self._j).first_pass(again=False)
                with draws, self._turns.turn(self._j):
                    loss = check_loss(self._loss(output, target)) * self._shares[i]
                self._values[i] = loss.detach()
        self._open[i] = loss, inlet
        if self._keeps:
            values = tuple([value.detach() if isinstance(value, Tensor) else value for value in microbatch.values])
            self.outputs[i] = MicroBatch(values, microbatch.structure)

    def grads(self, i: int) -> list[Tensor | None]:
        """Gradients of the outputs of micro-batch i."""
        loss, inlet = self._open.pop(i)
        if loss is None or not loss.requires_grad:
            return inlet.spread(())
        with use_stream(self._stream), self._turns.turn(self._j):
            return inlet.collect(torch.autograd.backward, loss)

    def total(self) -> Tensor:
        """The loss of the batch."""
        with use_stream(self._stream):
            values = [value for value in self._values if value is not None]
            return torch.stack(values).sum()


class BackwardPass:
    """The backward pass of one batch, which can be run once.

    ``streams`` are for each partition its device, its compute stream, and the caller's stream on the device. ``copies``
    gather the gradients of tied weights.
    """

    def __init__(
        self,
        runtime: Runtime,
        outputs: Outputs,
        streams: list[tuple[torch.device, Stream, Stream]],
        copies: Sequence[Copy],
    ) -> None:
        # Until their gradients are handed out.
        self.copies = copies
        self._outputs, self._streams = outputs, streams
        self._runtime: Runtime | None = runtime
        # Of all micro-batches, from the end of the backward pass until they are handed out.
        self.input_grads: list[Tensor | None] = []

    def take(self, grads: tuple[Tensor | None, ...]) -> None:
        """Take the gradients of all outputs, micro-batch by micro-batch."""
        check_whole("a scheduled backward pass", "checkpoint='never' without a schedule")
        if self._runtime is None:
            raise RuntimeError(
                "a scheduled backward pass must be the only one of its batch, got a second one; add the losses up, or "
                "leave out the schedule"
            )
        for _, computing, callers in self._streams:
            wait_stream(computing, callers)
        count = len(grads) // len(self._outputs.given)
        for i in range(len(self._outputs.given)):
            self._outputs.given[i] = list(grads[i * count : (i + 1) * count])

    def run(self) -> None:
        """Run every action; afterwards the caller's streams come after all of them."""
        # A loss that the caller keeps must not keep the runtime alive.
        runtime, self._runtime = self._runtime, None
        if runtime is None:
            return
        try:
            runtime.run(runtime.lists.backward)
        finally:
            after(self._streams)
        self.input_grads = [grad for grads in runtime.input_grads for grad in grads]


def after(streams: Sequence[tuple[torch.device, Stream, Stream]]) -> None:
    """Let the streams of the caller, and of this thread, come after the compute streams.

    Compute streams of their own wait for the caller's before every batch and every backward pass, and these for those
    afterwards: so what passes between them needs no record_stream.
    """
    for device, computing, callers in streams:
        for stream in (callers, current_stream(device)):
            wait_stream(stream, computing)


class Enter(Function):
    """(pass, indices, inputs..., tied weights...) -> a phony; backward gives the gradients of all these."""

    @staticmethod
    def forward(ctx: Any, backward_pass: BackwardPass, which: list[int], *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.which = backward_pass, which
        return get_phony(inputs[0].device).detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        grads, ctx.backward_pass.input_grads = ctx.backward_pass.input_grads, []
        copies, ctx.backward_pass.copies = ctx.backward_pass.copies, ()
        tied = [copy.take_grad() for copy in copies]
        return (None, None, *(grads[index] for index in ctx.which), *tied)


class Drive(Function):
    """(pass, phony) -> a phony on the CPU; backward runs all actions."""

    @staticmethod
    def forward(ctx: Any, backward_pass: BackwardPass, _: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.backward_pass = backward_pass
        return get_phony(_CPU).detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        ctx.backward_pass.run()
        return (None, None)


class Collect(Function):
    """(pass, frozen, phony, (outputs...)) -> outputs; backward takes their gradients."""

    @staticmethod
    def forward(ctx: Any, backward_pass: BackwardPass, frozen: list[int], _: Tensor, values: Values) -> Values:
        ctx.set_materialize_grads(False)
        ctx.backward_pass = backward_pass
        outputs = tuple([value.detach() if isinstance(value, Tensor) else value for value in values])
        ctx.mark_non_differentiable(*[outputs[index] for index in frozen])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.backward_pass.take(grads)
        return (None, None, None, None)


def attach(backward_pass: BackwardPass, inputs: list[MicroBatch], outputs: list[MicroBatch]) -> list[MicroBatch]:
    """``outputs`` with a graph in which ``backward_pass`` leads to ``inputs``, the micro-batches as they came."""
    flat = tuple([value for microbatch in outputs for value in microbatch.values])
    if not differentiable(flat):
        return outputs
    frozen = [index for index, value in enumerate(flat) if isinstance(value, Tensor) and not value.requires_grad]
    entering = [value for microbatch in inputs for value in microbatch.values]
    which = differentiable(entering)
    into = [*(entering[index] for index in which), *(copy.parameter for copy in backward_pass.copies)]
    phony = apply(Enter, backward_pass, which, *into) if into else new_leaf(_CPU)
    collected = iter(apply(Collect, backward_pass, frozen, apply(Drive, backward_pass, phony), flat))
    return [MicroBatch(tuple(next(collected) for _ in each.values), each.structure) for each in outputs]
