"""The computation of one micro-batch on one partition, as both executors run it: F, its first pass, or R."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.components import Components
from gpipe_bench.engine.aliases import aliased_values, refuse_write, separated
from gpipe_bench.engine.context import ExecutionContext
from gpipe_bench.engine.microbatch import MicroBatch, Values, versions
from gpipe_bench.engine.observer import Observer, Task, observed
from gpipe_bench.engine.partition import Partition
from gpipe_bench.engine.randomness import Batch, Draws
from gpipe_bench.engine.transfer import Endpoint, Route, Stream, use_stream
from gpipe_bench.skip.trees import TreeSpec

__all__ = ["BatchContext", "Computation"]


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What all tasks of one batch share.

    Attributes:
        components: which components are on.
        transfer: ``direct`` or ``host``.
        execution: the caller's thread-local modes.
        randomness: the batch's random numbers.
        observer: told of every task, if any.
        partitions: in place.
        ends: where the copies of each partition begin or end, a list by micro-batch.
    """

    components: Components
    transfer: str
    execution: ExecutionContext
    randomness: Batch
    observer: Observer | None
    partitions: list[Partition]
    ends: list[list[Endpoint]]

    def route(self, kind: str, i: int, source: int, target: int) -> Route | None:
        """How a ``copy`` or ``portal`` takes micro-batch i from partition to partition; None where there is no copy."""
        if not self.partitions[source].moves_to(self.partitions[target], self.transfer):
            return None
        return Route(kind, self.ends[source][i], self.ends[target][i], i, target, self.transfer, self.observer)


Around = Callable[[Callable[[Values], Values], Values], Values]


def run_alone(layers: Callable[[Values], Values], flat: Values) -> Values:
    """Nothing around the layers."""
    return layers(flat)


class Computation:
    """Task (i, j): flat values in, flat values out. Those of the micro-batch come first, skips follow.

    Args:
        batch: what all tasks of the batch share.
        partition: that with index j.
        i: the micro-batch.
        microbatch: its values tell how many there are and how the first layer sees them.
        aliased: indices of the flat inputs that share memory with tensors that go other ways.

    Attributes:
        structure: how the last layer gave its values; known after the first run.
        aliased: the same of the flat outputs.
    """

    __slots__ = ("_aliased", "_batch", "_count", "_draws", "_structure", "aliased", "i", "partition", "structure")

    def __init__(
        self, batch: BatchContext, partition: Partition, i: int, microbatch: MicroBatch, aliased: frozenset[int]
    ) -> None:
        self.partition, self.i = partition, i
        self.structure: TreeSpec | None = None
        self.aliased: frozenset[int] = frozenset()
        self._batch = batch
        self._count, self._structure, self._aliased = len(microbatch.values), microbatch.structure, aliased
        self._draws = Draws(batch.randomness, i, partition.j)

    @property
    def stream(self) -> Stream:
        """The compute stream."""
        return self._batch.ends[self.partition.j][self.i].computing

    def aliased_of(self, count: int) -> frozenset[int]:
        """Those of :attr:`aliased` among the first ``count`` outputs, which are the micro-batch's."""
        return frozenset(index for index in self.aliased if index < count)

    def forward(self, flat: Values, *, again: bool = False, around: Around = run_alone) -> Values:
        """Run with the graph that the caller's grad mode asks for.

        Args:
            flat: flat inputs.
            again: whether :meth:`recompute` may follow.
            around: calls the layers, and may do something before and after them in the same modes.
        """
        with use_stream(self.stream), self._batch.execution.applied(), self._draws.first_pass(again=again):
            # The first partition gets the caller's batch, of which it must not write to a part.
            keep = self.partition.j == 0 and self.partition.writes_inputs is not False
            return self._run("forward", flat, around, keep=keep)

    def first_pass(self, flat: Values) -> Values:
        """Run without a graph; :meth:`recompute` follows."""
        with use_stream(self.stream), self._batch.execution.applied(checkpointing=True), self._draws.first_pass():
            return self._run("forward", flat, run_alone, keep=True)

    def recompute(self, flat: Values, *, around: Around = run_alone) -> Values:
        """Run again with a graph, on the same inputs, with the same random numbers and modes; see :meth:`forward`."""
        with use_stream(self.stream), self._batch.execution.applied(recomputing=True), self._draws.replay():
            return self._run("recompute", flat, around, keep=True)

    def observed(self, kind: str, job: Any, *args: Any) -> Any:
        """Run ``job`` and report it as a task of this kind."""
        observer = self._batch.observer
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
        if kind == "forward" and (self._aliased or len(outputs) > 1):
            self.aliased = aliased_values(outputs, [flat[index] for index in self._aliased])
        if kind == "forward" and partition.j == 0 and len(self._batch.partitions) > 1:
            # Micro-batches count writes together: a later partition must not write to a part of the caller's batch.
            outputs = separated(outputs, flat)
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
            partition.writes_inputs = bool(partition.writes_inputs)
            return
        written = [index for index, (one, other) in enumerate(zip(before, after, strict=True)) if one != other]
        if not self._aliased.isdisjoint(written):
            raise refuse_write(partition.j)
        partition.writes_inputs = True
        if not copies and (kind == "recompute" or not torch.is_grad_enabled()):
            raise RuntimeError(
                f"layers of partition {partition.j} must write to their input from the first batch on or never, got "
                "the first in-place operation in a later one; run the batch again: from now on the input is kept"
            )


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
