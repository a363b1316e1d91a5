"""The computation of one micro-batch on one partition, as both executors run it: F, its first pass, or R."""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from traceback import clear_frames
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from gpipe_bench.autograd.microbatch import (
    MicroBatch,
    Values,
    aliased_values,
    cut,
    has_memory,
    needs_gradient,
    separated,
    versions,
)
from gpipe_bench.engine.observer import Task, observed
from gpipe_bench.engine.partition import Partition
from gpipe_bench.engine.pipeline import BatchContext
from gpipe_bench.engine.randomness import Draws
from gpipe_bench.engine.transfer import use_stream
from gpipe_bench.errors import UnsupportedError
from gpipe_bench.skip.trees import TreeSpec

Around = Callable[[Callable[[Values], Values], Values], Values]


class Computation:
    """Task (i, j): flat values in, flat values out. Those of the micro-batch come first, skips follow.

    Args:
        batch: what all tasks of the batch share.
        partition: that with index j.
        i: the micro-batch.
        microbatch: tells how many values are its own, and how the first layer sees them.
        aliased: indices of the flat inputs that share memory with tensors that go other ways.

    Attributes:
        stream: the compute stream.
        structure: how the last layer gave its values; known after the first run.
        aliased: as above, of the flat outputs.
        draws: its random numbers. If the first pass was unsure of them, a recomputation must take its place.
    """

    __slots__ = (
        "_aliased",
        "_batch",
        "_count",
        "_structure",
        "aliased",
        "draws",
        "i",
        "partition",
        "stream",
        "structure",
    )

    def __init__(
        self, batch: BatchContext, partition: Partition, i: int, microbatch: MicroBatch, aliased: frozenset[int]
    ) -> None:
        self.partition, self.i, self.stream = partition, i, batch.streams[partition.j][i].computing
        self.structure: TreeSpec | None = None
        self.aliased: frozenset[int] = frozenset()
        self._batch = batch
        self._count, self._structure, self._aliased = len(microbatch.values), microbatch.structure, aliased
        self.draws = Draws(batch.randomness, i, partition.j)

    def microbatch(self, values: Values) -> MicroBatch:
        """The first outputs, without skips, for the next layer."""
        return MicroBatch(values, self.structure, frozenset(index for index in self.aliased if index < len(values)))

    def forward(self, flat: Values, *, again: bool = False, around: Around = operator.call) -> Values:
        """Run with the graph that the caller's grad mode asks for; ``again`` says whether :meth:`recompute` may follow.

        ``around`` calls the layers, and may do something before and after them in the same modes.
        """
        with use_stream(self.stream), self._batch.execution.applied(), self.draws.first_pass(again=again):
            # The first partition gets the caller's batch, of which it must not write to a part.
            keep = self.partition.j == 0 and self.partition.writes_inputs is not False
            return self._run("forward", flat, around, keep=keep)

    def first_pass(self, flat: Values) -> tuple[Values, list[bool]]:
        """Run without a graph; :meth:`recompute` follows, and at once if ``draws.unsure``.

        Returns:
            The outputs, and whether each counts as needing a gradient. As in ``torch.utils.checkpoint``, every output
            that can have a gradient does, except an input that needs none and is handed on as it is.
        """
        # A hook that a layer registers on its input belongs to the recomputation alone, not to the graph outside.
        flat = cut(flat)
        needs: list[bool] = []

        def run(layers: Callable[[Values], Values], inputs: Values) -> Values:
            before = versions(inputs)
            outputs = layers(inputs)
            after = versions(inputs)
            frozen = {
                id(value)
                for value, given, one, other in zip(inputs, flat, before, after, strict=True)
                if one == other and not needs_gradient(given)
            }
            for each in outputs:
                is_tensor = isinstance(each, Tensor)
                if is_tensor and each.is_nested and each.layout is torch.strided:
                    raise UnsupportedError(
                        "nested tensors that a checkpointed partition hands on must be jagged, got one with the layout "
                        "strided, of which autograd makes no outputs; make it with layout=torch.jagged, or use "
                        "checkpoint='never'"
                    )
                # Real or complex numbers.
                can_have = is_tensor and (each.is_floating_point() or each.is_complex())
                needs.append(can_have and id(each) not in frozen)
            return outputs

        with use_stream(self.stream), self._batch.execution.applied(checkpointing=True), self.draws.first_pass():
            return self._run("forward", flat, run, keep=True), needs

    def recompute(self, flat: Values, *, around: Around = operator.call) -> Values:
        """Run again with a graph, on the same inputs, with the same random numbers and modes; see :meth:`forward`."""

        def run() -> Values:
            with use_stream(self.stream), self._batch.execution.applied(recomputing=True), self.draws.replay():
                return self._run("recompute", flat, around, keep=True)

        try:
            # A backward pass may run in a thread of autograd's own. A context can be entered once at a time.
            return self._batch.execution.variables.copy().run(run)
        except KeyboardInterrupt as error:
            # A block that was interrupted while it was entered or left ends with its frames: now, within the backward
            # pass, not when the caller drops the traceback. It puts back modes of the backward pass.
            clear_frames(error.__traceback__)
            raise

    def observed(self, kind: str, job: Any, *args: Any) -> Any:
        """Run ``job`` on the compute stream, with the partition's copies of tied weights, and report it as a task."""
        observer, copies, j = self._batch.observer, self._batch.copies, self.partition.j
        with use_stream(self.stream), self._batch.turns.turn(j), copies.in_use(j) if copies else nullcontext():
            return job(*args) if observer is None else observed(observer, self.task, (kind,), job, *args)

    def task(self, kind: str) -> Task:
        """What an observer is told of this computation."""
        return Task(kind, self.i, self.partition.j, self.partition.device, self.stream, "compute")

    def _run(self, kind: str, flat: Values, around: Around, *, keep: bool) -> Values:
        """Compute; with ``keep`` the inputs stay as they are, even if layers work in place.

        Copies are made for the first task of a partition, which shows whether its layers write to them, and then only
        if they do.
        """
        partition = self.partition
        if not keep and not self._aliased:
            outputs: Values = self.observed(kind, around, self._compute, flat)
        else:
            copies = keep and partition.writes_inputs is not False
            inputs = tuple([_clone(value) for value in flat]) if copies else flat
            before = versions(inputs)
            outputs = self.observed(kind, around, self._compute, inputs)
            self._check_writes(before, versions(inputs), kind, copies=copies or not keep)
            flat = inputs
        if kind == "forward" and (self._aliased or len(outputs) > 1 or partition.skips.shared):
            self.aliased = aliased_values(outputs, [flat[index] for index in self._aliased])
            skips = partition.skips
            first = len(outputs) - len(skips.outgoing)
            self.aliased |= {place for place, copy in enumerate(skips.outgoing, first) if copy in skips.shared}
        if kind == "forward":
            if self.i == 0:
                layers = partition.layers
                kept = [*layers.buffers(), *(each for each in layers.parameters() if not each.requires_grad)]
                kept += [each for layer in layers.modules() for each in vars(layer).values()]
                kept = [each for each in kept if isinstance(each, Tensor) and not is_lazy(each)]
                partition.kept = {each.untyped_storage().data_ptr() for each in kept if has_memory(each)}
            # Micro-batches count writes together: a later partition must not write to a part of the caller's batch.
            # And a layer may write to what it keeps for the next micro-batch, before this value is used.
            first = partition.j == 0 and len(self._batch.partitions) > 1
            outputs = separated(outputs, flat if first else (), partition.kept)
        return outputs

    def _compute(self, flat: Values) -> Values:
        if self._aliased and self._batch.execution.inference:
            # Inference tensors count no writes, but refuse them in any other mode; the others are replaced by copies.
            with torch.inference_mode(mode=False), torch.no_grad():
                flat = tuple([value if index in self._aliased else _clone(value) for index, value in enumerate(flat)])
                outputs, self.structure = self.partition.compute(flat, self._count, self._structure)
        else:
            outputs, self.structure = self.partition.compute(flat, self._count, self._structure)
        return outputs

    def _check_writes(self, before: list[int], after: list[int], kind: str, *, copies: bool) -> None:
        partition = self.partition
        if before == after:
            if not self._batch.execution.inference:  # whose tensors count no writes
                partition.writes_inputs = bool(partition.writes_inputs)
            return
        written = [index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
        if not self._aliased.isdisjoint(written):
            raise RuntimeError(
                f"a tensor that enters or leaves a partition twice must not be written to behind the boundary, got an "
                f"in-place operation in partition {partition.j} on one that also went another way; clone it before, or "
                "work out of place"
            )
        partition.writes_inputs = True
        if not copies and (kind == "recompute" or not torch.is_grad_enabled()):
            raise RuntimeError(
                f"layers of partition {partition.j} must write to their input from the first batch on or never, got "
                "the first in-place operation in a later one; run the batch again: from now on the input is kept"
            )


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
