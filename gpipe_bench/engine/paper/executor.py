"""The paper's executor: one autograd graph through all partitions, made by the steps of the paper's program.

:mod:`gpipe_bench.schedules.program` says which step follows which; :class:`TorchLanes` carries them out with PyTorch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.autograd.microbatch import MicroBatch, Values, differentiable
from gpipe_bench.autograd.nodes import behind, get_phony, is_users, new_leaf, nodes_behind
from gpipe_bench.engine.computation import Computation
from gpipe_bench.engine.goal import Goal, check_loss
from gpipe_bench.engine.paper.checkpoint import Guard, Recompute, Slot
from gpipe_bench.engine.paper.checkpoint import checkpoint as run_checkpointed
from gpipe_bench.engine.paper.copy import Portal, Return, copy, wait
from gpipe_bench.engine.paper.dependency import Join, Together, fork
from gpipe_bench.engine.paper.marks import run_marked
from gpipe_bench.engine.pipeline import Batch, BatchContext
from gpipe_bench.engine.transfer import Holding, Stream, at_end_of_backward, use_stream
from gpipe_bench.engine.worker import Result, Workers, in_fresh_thread, raised, result_of
from gpipe_bench.schedules.program import Plan, run_forward
from gpipe_bench.skip.layout import SkipCopy
from gpipe_bench.skip.trees import tree_map_only


class PaperExecutor:
    """Runs batches by the paper's program; autograd orders the backward pass."""

    def forward(self, batch: Batch) -> Any:
        """What the last layer gives for the whole batch."""
        plan, stop = batch.plan, threading.Event()

        def run() -> list[MicroBatch]:
            with context.execution.applied():
                numbers = sorted({partition.worker for partition in context.partitions})
                workers = Workers(numbers) if context.threads else None
                lanes = TorchLanes(plan, batch.microbatches, context, workers, stop)
                try:
                    run_forward(plan, lanes)
                finally:
                    lanes.drain()
                return lanes.microbatches

        with batch.context(whole=not plan.checkpointed) as context:
            outputs = in_fresh_thread(run, stop.set) if context.threads else run()
            batch.order_streams(outputs, entering=False)
        output = batch.gather(outputs)
        if not plan.checkpointed:
            return output.unwrap()
        own = [(computing, callers) for _, computing, callers in batch.streams if computing != callers]
        return MicroBatch(behind(Guard, output.values, own), output.structure).unwrap()

    def step(self, batch: Batch, goal: Goal) -> tuple[Tensor, Any]:
        """Compute one loss of the whole batch, or of ready-made micro-batches, and run backward from there."""
        if batch.chunks is None:
            criterion, targets, shares = goal.shared(None, batch.sizes, learning=False)
            output = self.forward(batch)
            triples = [triple for triple in zip(output, targets, shares, strict=True) if triple[-1]]
            loss = torch.stack([check_loss(criterion(each, target)) * share for each, target, share in triples]).sum()
        else:
            goal.split(batch.chunks, batch.sizes)
            output = self.forward(batch)
            loss = check_loss(goal.loss(output, goal.target))
        if loss.requires_grad:
            torch.autograd.backward(loss)
        return loss.detach(), tree_map_only(Tensor, Tensor.detach, output)


class TorchLanes:
    """One batch on its way forward; a method for each step of the program, called from one host thread.

    It replaces each of ``microbatches`` by what a partition makes of it. Without workers tasks run in this thread.
    ``stop`` ends the batch before its next task.
    """

    def __init__(
        self,
        plan: Plan[SkipCopy],
        microbatches: list[MicroBatch],
        batch: BatchContext,
        workers: Workers | None,
        stop: threading.Event,
    ) -> None:
        self.microbatches = microbatches
        self._plan, self._partitions, self._batch = plan, batch.partitions, batch
        self._workers, self._stop = workers, stop
        self._holding = Holding(at_end_of_backward)
        self._streams = batch.streams
        # Skips that travel to each partition in the tuple of their micro-batch.
        self._riding = [[] if plan.components.portals else each.skips.incoming for each in batch.partitions]
        # Skips on their way, and which of them share memory with another tensor, per micro-batch.
        self._skips: list[dict[SkipCopy, Tensor | None]] = [{} for _ in microbatches]
        self._aliased: list[set[SkipCopy]] = [set() for _ in microbatches]
        # Skips that are on the device of a partition that will read them, per micro-batch: by skip and partition.
        self._there: list[dict[tuple[SkipCopy, int], Tensor]] = [{} for _ in microbatches]
        # The phony of Fork (i, j), until Join (i + 1, j) takes it; and one that still has to be taken on partition j.
        self._phonies: dict[tuple[int, int], Tensor | None] = {}
        self._pending: list[Tensor | None] = [None] * plan.m
        # Tasks between launch and their last step: what computes them, their inputs and slot if they are recomputed.
        self._running: dict[tuple[int, int], tuple[Computation, Values, Slot | None]] = {}
        self._results: dict[tuple[int, int], Result] = {}
        if workers is not None and plan.backward:
            _outrank_checkpoints(plan.m * plan.n)

    # --- fence ---------------------------------------------------------------------------------------------------

    def join(self, i: int, j: int) -> None:
        """Tie micro-batch i, about to enter partition j, to Fork (i-1, j)."""
        phony = self._phonies.pop((i - 1, j), None)
        riding = self._riding[j]
        flat = self._flat(i, riding)
        if phony is None or not differentiable(flat):
            self._pending[i] = phony
            return
        with use_stream(self._streams[j - 1][i].copying if j > 0 else self._streams[0][i].computing):
            self._put(i, behind(Join, flat, phony), riding)

    def portal(self, i: int, j: int, skip: SkipCopy) -> None:
        """Move a skip of micro-batch i to partition j, from the one that had it before, unless it is there already."""
        here, there = self._there[i].pop((skip, j), None), self._skips[i][skip]
        route = self._batch.route("portal", i, self._partitions[j].skips.previous[skip], j)
        if there is None or route is None:
            return
        (self._skips[i][skip],) = (
            copy(route, self._holding, (there,), Portal)
            if here is None
            else copy(route, self._holding, (here, there), Return)
        )

    def copy(self, i: int, j: int) -> None:
        """Move micro-batch i, and the skips that ride along, from partition j-1 to j."""
        route, riding = self._batch.route("copy", i, j - 1, j), self._riding[j]
        if route is not None:
            self._put(i, copy(route, self._holding, self._flat(i, riding)), riding)

    # --- compute -------------------------------------------------------------------------------------------------

    def await_copy(self, i: int, j: int) -> None:
        """Make the compute stream of partition j wait for the copy of micro-batch i."""
        end, incoming = self._streams[j][i], self._partitions[j].skips.incoming
        if end.copying != end.computing:
            self._put(i, wait(end.computing, end.copying, self._flat(i, incoming), end.copying), incoming)

    def launch(self, i: int, j: int, *, checkpoint: bool) -> None:
        """Start task (i, j)."""
        if self._stop.is_set():
            raise KeyboardInterrupt
        partition, incoming = self._partitions[j], self._partitions[j].skips.incoming
        flat = self._flat(i, incoming)
        microbatch = self.microbatches[i]
        shared = {index for index, skip in enumerate(incoming, len(microbatch.values)) if skip in self._aliased[i]}
        # Its skips are on their way no more.
        for skip in incoming:
            del self._skips[i][skip]
        self._aliased[i].difference_update(incoming)
        task = Computation(self._batch, partition, i, microbatch, microbatch.aliased | shared)
        phony, self._pending[i] = self._pending[i], None
        # In a batch with checkpoints every task is one node, also one that keeps its activations: a Join can be tied to
        # it, and layers behind an output that gets no gradient do not run backward.
        keep = not checkpoint
        if self._plan.checkpointed and (differentiable(flat) or self._batch.trained[j]):
            slot = Slot(task)
            self._running[i, j] = task, () if keep else flat, None if keep else slot
            # A leaf keeps the node in the graph, behind a Join if the inputs could not be tied. Or tied weights do:
            # they get the gradients of their copies when all nodes of the partition have run.
            with use_stream(self._streams[j][i].computing):
                entrance = self._batch.copies.entrance(partition) if self._batch.copies else None
                leaf = new_leaf(partition.device) if entrance is None else entrance
                edge = leaf if phony is None else behind(Join, (leaf,), phony)[0]
            job = partial(run_checkpointed, slot, flat, edge, keep=keep)
        else:
            self._running[i, j] = task, (), None
            job = partial(self._run_plain, task, flat)
        if self._workers is not None:
            self._workers.submit(partition.worker, job)
        else:
            self._results[i, j] = result_of(job)

    def collect(self, i: int, j: int) -> None:
        """Take the result of (i, j); raises what the task raised."""
        partition, (task, _, _) = self._partitions[j], self._running[i, j]
        outgoing, targets = partition.skips.outgoing, partition.skips.targets
        if self._workers is not None:
            flat: Values = raised(self._workers.collect(partition.worker))
        else:
            flat = raised(self._results.pop((i, j)))
        count = len(flat) - len(outgoing)
        self.microbatches[i] = task.microbatch(flat[:count])
        self._aliased[i] |= {skip for index, skip in enumerate(outgoing, count) if index in task.aliased}
        for skip, value in zip(outgoing, flat[count:], strict=True):
            self._skips[i][skip] = value
            for target in targets[skip]:
                if value is not None and self._partitions[target].skips.previous[skip] != j:
                    self._there[i][skip, target] = value.detach()

    # --- leave ---------------------------------------------------------------------------------------------------

    def await_compute(self, i: int, j: int) -> None:
        """Make the copy stream of micro-batch i on partition j wait for its computation."""
        end, outgoing = self._streams[j][i], self._partitions[j].skips.outgoing
        if end.copying != end.computing:
            self._put(i, wait(end.copying, end.computing, self._flat(i, outgoing), end.copying), outgoing)

    def recompute(self, i: int, j: int) -> None:
        """Put the recomputation of (i, j) ahead of its gradient."""
        _, inputs, slot = self._running.pop((i, j))
        if slot is not None:
            outgoing = self._partitions[j].skips.outgoing
            with use_stream(self._leaving(i, j)):
                self._put(i, behind(Recompute, self._flat(i, outgoing), slot, inputs), outgoing)

    def fork(self, i: int, j: int) -> None:
        """Hold B(i, j) back until Join (i+1, j) has run backward."""
        outgoing = self._partitions[j].skips.outgoing
        with use_stream(self._leaving(i, j)):
            flat, self._phonies[i, j] = fork(self._flat(i, outgoing))
        self._put(i, flat, outgoing)

    def drain(self) -> None:
        """After an exception, wait until every launched task has ended."""
        self._results.clear()
        if self._workers is not None:
            self._workers.end()

    # --- tasks -----------------------------------------------------------------------------------------------------

    def _run_plain(self, task: Computation, flat: Values) -> Values:
        observer = self._batch.observer
        skips = task.partition.skips
        first = len(flat) - len(skips.incoming)
        summed = frozenset(index for index, skip in enumerate(skips.incoming, first) if skips.uses[skip] > 1)
        around = partial(_with_own_gradients, summed=summed, together=bool(skips.shared))
        run = partial(task.forward, around=around)
        if observer is None or not self._plan.backward:
            return run(flat)
        with use_stream(task.stream), self._batch.execution.applied():
            return run_marked(observer, task.task("backward"), run, flat)

    # --- tensors on their way --------------------------------------------------------------------------------------

    def _flat(self, i: int, skips: Sequence[SkipCopy]) -> Values:
        values = self.microbatches[i].values
        return (*values, *[self._skips[i][key] for key in skips]) if skips else values

    def _put(self, i: int, flat: Values, skips: Sequence[SkipCopy]) -> None:
        """Replace the values of micro-batch i and some skips by what a node made of them."""
        before = self.microbatches[i]
        count = len(before.values)
        self.microbatches[i] = MicroBatch(flat[:count], before.structure, before.aliased)
        self._skips[i].update(zip(skips, flat[count:], strict=True))

    def _leaving(self, i: int, j: int) -> Stream:
        """The stream on which gradients of (i, j) arrive."""
        end = self._streams[j][i]
        return end.copying if j < self._plan.n - 1 else end.computing


def _with_own_gradients(
    layers: Callable[[Values], Values], flat: Values, *, summed: AbstractSet[int], together: bool
) -> Values:
    """Run layers; in the backward pass each custom function gets gradients of its own, which it may write to.

    All tasks are one graph, which autograd runs in another order than that of the plain module. So a custom function
    may run before other nodes that have got the same gradient.

    Args:
        layers: of a task.
        flat: its inputs.
        summed: indices of the inputs whose gradients are added up on the compute stream, those of skips with several
            readers. A copy stream would read gradients that autograd may then write to.
        together: whether its backward pass begins when the gradients of all outputs have come. Else autograd might add
            the task's own gradient of a skip before that of later readers, which the plain module adds first.
    """
    flat = tuple([behind(Together, (value,))[0] if index in summed else value for index, value in enumerate(flat)])
    ends = [value.grad_fn for value in flat if isinstance(value, Tensor)]
    outputs = layers(flat)
    for node in nodes_behind([value.grad_fn for value in outputs if isinstance(value, Tensor)], ends):
        if is_users(node):
            node.register_prehook(_cloned)
    return behind(Together, outputs[::-1])[::-1] if together else outputs


def _cloned(grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    return tuple([None if grad is None else grad.clone() for grad in grads])


def _outrank_checkpoints(count: int) -> None:
    """Make this thread's next node outrank every checkpoint, of which workers make ``count`` at most.

    Autograd prefers the higher number among nodes that are ready, and every thread counts its nodes from zero. In
    torchgpipe the thread that makes the nodes between tasks is old, and the threads that make checkpoints are fresh.
    """
    phony = get_phony(torch.device("cpu")).detach().requires_grad_()
    for _ in range(count):
        phony.view_as(phony)
