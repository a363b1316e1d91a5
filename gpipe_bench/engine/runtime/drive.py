"""``pipe(x)`` and ``loss.backward()`` on the runtime: the backward pass of a batch as three nodes of autograd.

    inputs ── Enter ── phony ── Drive ── phony ── Collect ── outputs

Backward, Collect takes the gradients of all outputs, Drive runs all actions but F, and Enter hands out the gradients of
the inputs. Collect and Enter are nodes of their devices, so autograd orders their streams. Drive is one of the CPU,
which autograd runs in the thread that called ``backward()``: the thread of a device must stay free, since the backward
passes of the cells need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpipe_bench.autograd.microbatch import MicroBatch, Values, differentiable
from gpipe_bench.autograd.nodes import apply, check_whole, get_phony, new_leaf
from gpipe_bench.engine.runtime.runtime import Runtime
from gpipe_bench.engine.transfer import Stream, current_stream, wait_stream

__all__ = ["BackwardPass", "Outputs", "attach"]

_CPU = torch.device("cpu")


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


class BackwardPass:
    """The backward pass of one batch, which can be run once.

    ``places`` are for each partition its device, its compute stream, and the caller's stream on the device.
    """

    def __init__(self, runtime: Runtime, outputs: Outputs, places: list[tuple[torch.device, Stream, Stream]]) -> None:
        self._outputs, self._places = outputs, places
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
        for _, computing, callers in self._places:
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
            after(self._places)
        self.input_grads = [grad for grads in runtime.input_grads for grad in grads]


def after(places: Sequence[tuple[torch.device, Stream, Stream]]) -> None:
    """Let the streams of the caller, and of this thread, come after the compute streams.

    Compute streams of their own wait for the caller's before every batch and every backward pass, and these for those
    afterwards: so what passes between them needs no record_stream.
    """
    for device, computing, callers in places:
        for stream in (callers, current_stream(device)):
            wait_stream(stream, computing)


class Enter(Function):
    """(pass, indices, inputs...) -> a phony; backward gives gradients of the inputs."""

    @staticmethod
    def forward(ctx: Any, backward_pass: BackwardPass, which: list[int], *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.backward_pass, ctx.which = backward_pass, which
        return get_phony(inputs[0].device).detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        grads, ctx.backward_pass.input_grads = ctx.backward_pass.input_grads, []
        return (None, None, *(grads[index] for index in ctx.which))


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
    phony = apply(Enter, backward_pass, which, *(entering[index] for index in which)) if which else new_leaf(_CPU)
    collected = iter(apply(Collect, backward_pass, frozen, apply(Drive, backward_pass, phony), flat))
    return [MicroBatch(tuple(next(collected) for _ in each.values), each.structure) for each in outputs]
