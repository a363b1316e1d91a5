"""A batch on its way through a pipeline, in one of two executors.

The paper's executor follows torchgpipe (Kim et al., arXiv 2004.09910), which brought GPipe (Huang et al., arXiv
1811.06965) to PyTorch. The runtime runs any schedule. How a batch is cut into micro-batches, and how their results are
put together, is up to the classes that users see: :class:`gpipe_bench.engine.gpipe.GPipe` and
:class:`gpipe_bench.engine.pipe.Pipe`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from gpipe_bench.engine.batchnorm import deferring
from gpipe_bench.engine.computation import BatchContext
from gpipe_bench.engine.context import ExecutionContext, uncached_weights
from gpipe_bench.engine.layers import NOT_TRACED, Layers
from gpipe_bench.engine.microbatch import MicroBatch
from gpipe_bench.engine.nodes import behind
from gpipe_bench.engine.paper.checkpoint import Guard
from gpipe_bench.engine.paper.executor import PaperExecutor
from gpipe_bench.engine.randomness import BatchRandomness
from gpipe_bench.engine.replicas import active_replica, check_layers, check_no_replica, check_replica
from gpipe_bench.engine.runtime.drive import BackwardPass, Outputs, after, attach
from gpipe_bench.engine.runtime.lists import ActionLists
from gpipe_bench.engine.runtime.loss import Losses, check_loss, check_target, split_targets
from gpipe_bench.engine.runtime.reduction import Reduction, reduced
from gpipe_bench.engine.runtime.runtime import End, Runtime
from gpipe_bench.engine.worker import Turns, Workers, in_fresh_thread, this_thread
from gpipe_bench.errors import ScheduleError, UnsupportedError
from gpipe_bench.schedules.program import Plan, run_forward
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.trees import tree_map_only

Gather = Callable[[list[MicroBatch]], MicroBatch]


class Pipeline(Layers):
    """Runs batches; see :class:`gpipe_bench.GPipe` for the arguments."""

    def _forward(self, microbatches: list[MicroBatch], gather: Gather) -> Any:
        """What the last layer gives for micro-batches."""
        plan = self._plan(len(microbatches))
        if plan.backward and (replica := active_replica()) is not None:
            check_replica(replica, self, plan.m, whole=self._choice is None and not plan.checkpointed)
        if self._choice is None:
            return self._paper(plan, microbatches, gather).unwrap()
        lists = self._choice.lists(plan.m, plan.checkpointed, early_recompute=plan.components.early_recompute)
        if plan.backward and not lists.facts.schedule.forwards_first:
            rule = "schedule must end its forward passes before it begins its backward passes for pipe(x)"
            advice = "call pipe.step(input, target, loss), or pipe(x) under torch.no_grad()"
            raise ScheduleError([f"{rule}, got {lists.name}; {advice}"])
        end = Outputs(plan.m)
        with self._entered(plan, microbatches) as batch:
            runtime = self._runtime(batch, plan, list(microbatches), lists, end)
            runtime.run(lists.forward)
            outputs, end.microbatches = end.microbatches, []
            self._hand_over(outputs, entering=False)
        if plan.backward:
            outputs = attach(BackwardPass(runtime, end, self._streams()), microbatches, outputs)
        return gather(outputs).unwrap()

    def _step(
        self,
        microbatches: list[MicroBatch],
        sizes: Sequence[int],
        target: Any,
        loss: Callable[[Any, Any], Tensor],
        gather: Gather,
        *,
        return_output: bool,
        reduction: Reduction,
    ) -> Any:
        """A training step: the loss of the batch, and its output if asked for. Empties ``microbatches``."""
        if not self.partitions:
            raise ValueError("pipe must have a layer to train, got an empty nn.Sequential; add layers")
        if not callable(loss):
            raise TypeError(
                f"loss must be a function of (output, target), got {loss!r:.60}; pass one, such as mse_loss"
            )
        if torch.is_grad_enabled() and (replica := active_replica()) is not None:
            check_no_replica(replica, self)
        targets = split_targets(target, self.chunks, sizes)
        if self._choice is None:
            output = self._forward(microbatches, gather)
            value = check_loss(loss(output, target))
            if value.requires_grad:
                torch.autograd.backward(value)
            found = value.detach(), tree_map_only(Tensor, Tensor.detach, output)
            return found if return_output else found[0]
        plan = self._plan(len(microbatches))
        if plan.backward:
            check_target(target)
        lists = self._choice.lists(plan.m, plan.checkpointed, early_recompute=plan.components.early_recompute)
        loss, shares = reduced(loss, reduction, target, targets, sizes)
        entering = [value for microbatch in microbatches for value in microbatch.values]
        with self._entered(plan, microbatches) as batch:
            end = Losses(loss, targets, shares, batch, keeps=return_output)
            runtime = self._runtime(batch, plan, microbatches, lists, end)
            microbatches.clear()
            try:
                runtime.run(lists.facts.order if plan.backward else lists.forward)
                total = end.total()
            finally:
                # The loss has been made on the stream of the last partition: the caller comes after it, too.
                after(self._streams())
        hand_back(entering, runtime.input_grads)
        return (total, gather(end.outputs).unwrap()) if return_output else total

    def _paper(self, plan: Plan[SkipKey], microbatches: list[MicroBatch], gather: Gather) -> MicroBatch:
        """Run micro-batches in the paper's executor, and put the outputs together."""
        stop = threading.Event()
        # Without the clock-cycle, or with nothing to run beside, the calling thread issues every task.
        alone = not self._has_threads(plan)

        def run() -> list[MicroBatch]:
            with batch.execution.applied():
                workers = None if alone else Workers(sorted({partition.worker for partition in self._places}))
                executor = PaperExecutor(plan, self._layout, microbatches, batch, workers, stop)
                try:
                    run_forward(plan, executor)
                finally:
                    executor.drain()
                return executor.microbatches

        with self._entered(plan, microbatches) as batch:
            outputs = run() if alone else in_fresh_thread(run, stop.set)
            self._hand_over(outputs, entering=False)
        output = gather(outputs)
        if not plan.checkpointed:
            return output
        own = [(computing, callers) for _, computing, callers in self._streams() if computing != callers]
        return MicroBatch(behind(Guard, output.values, own), output.structure)

    @contextmanager
    def _entered(self, plan: Plan[SkipKey], microbatches: list[MicroBatch]) -> Iterator[BatchContext]:
        """What the tasks of a batch share, for as long as its forward passes run."""
        anew = bool(plan.checkpointed) or self._choice is not None
        entering = [value for each in microbatches for value in each.values if isinstance(value, Tensor)]
        tensors = (*entering, *self.parameters())
        # PyTorch has not annotated it.
        if any(unpack_dual(tensor).tangent is not None for tensor in tensors):  # type: ignore[no-untyped-call]
            raise UnsupportedError(NOT_TRACED)
        if plan.backward:
            check_layers(self, whole=not anew)
        shared = plan.m > 1 and plan.n > 1
        # A tensor that is not split has as many rows as one that is, or more. In a process without the first partition
        # nothing is known of them.
        rows = [
            min((value.size(0) for value in each.values if isinstance(value, Tensor) and value.dim()), default=0)
            for each in microbatches
        ] or [0]
        with self._lock, deferring(self._deferred, plan.m), uncached_weights(shared=shared, anew=anew):
            self._hand_over(microbatches, entering=True)
            # Tasks draw the same random numbers in every thread.
            concurrent = plan.components.clock_cycle and shared
            randomness = BatchRandomness(
                self.devices, self.partitions, self._drawing, concurrent=concurrent, training=self.training
            )
            aside, threads = plan.components.copy_streams and plan.n > 1, self._has_threads(plan)
            mode = self.training, threads
            before, this_thread.locks = this_thread.locks, (*this_thread.locks, self._lock)
            try:
                yield BatchContext(
                    components=self.components,
                    transfer=self.transfer,
                    execution=ExecutionContext.capture(self.devices),
                    randomness=randomness,
                    turns=self._turns.get(mode) or self._turns.setdefault(mode, Turns(threads=threads)),
                    observer=self._observer,
                    partitions=self._places,
                    ends=[each.endpoints(plan.m, each.computing(), copy_streams=aside) for each in self._places],
                    rows=(rows[0], rows[-1]),
                    trained=[any(weight.requires_grad for weight in each.layers.parameters()) for each in self._places],
                )
            finally:
                this_thread.locks = before
                randomness.end()

    def _plan(self, m: int) -> Plan[SkipKey]:
        return Plan(
            m=m,
            n=len(self.partitions),
            components=self.components,
            checkpoint=self.checkpoint if self.training else "never",
            arrivals={each.j: each.incoming for each in self._places},
            backward=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        )

    def _runtime(
        self, batch: BatchContext, plan: Plan[SkipKey], microbatches: list[MicroBatch], lists: ActionLists, end: End
    ) -> Runtime:
        threads = self._has_threads(plan) and len(set(lists.groups)) > 1
        return Runtime(self._layout, microbatches, batch, lists, end, learning=plan.backward, threads=threads)

    def _has_threads(self, plan: Plan[SkipKey]) -> bool:
        """Whether tasks run in threads of their own: not without clock-cycles, nor where nothing runs beside them."""
        return self.workers != "never" and plan.components.clock_cycle and plan.n > 1


def hand_back(entering: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> None:
    """Give the flat values of all micro-batches their gradients."""
    flat = [grad for each in grads for grad in each]
    pairs = [(value, grad) for value, grad in zip(entering, flat, strict=False) if grad is not None]
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
