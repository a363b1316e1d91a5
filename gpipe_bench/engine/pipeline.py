"""A batch on its way through a pipeline, in one of two executors.

The paper's executor follows torchgpipe (Kim et al., arXiv 2004.09910), which brought GPipe (Huang et al., arXiv
1811.06965) to PyTorch. The runtime runs any schedule. How a batch is cut into micro-batches, and how their results are
put together, is up to the classes that users see, which hold a pipeline: :class:`gpipe_bench.engine.gpipe.GPipe`,
:class:`gpipe_bench.engine.pipe.Pipe` and :class:`gpipe_bench.distributed.Pipe`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from gpipe_bench.autograd.microbatch import MicroBatch
from gpipe_bench.autograd.nodes import behind
from gpipe_bench.engine.batchnorm import deferring
from gpipe_bench.engine.computation import BatchContext
from gpipe_bench.engine.context import ExecutionContext, uncached_weights
from gpipe_bench.engine.layers import NOT_TRACED, Layers
from gpipe_bench.engine.paper.checkpoint import Guard
from gpipe_bench.engine.paper.executor import PaperExecutor
from gpipe_bench.engine.partition import Partition, place
from gpipe_bench.engine.randomness import BatchRandomness
from gpipe_bench.engine.replicas import active_replica, check_layers, check_no_replica, check_replica
from gpipe_bench.engine.runtime.drive import BackwardPass, Outputs, after, attach
from gpipe_bench.engine.runtime.lists import ActionLists, Choice
from gpipe_bench.engine.runtime.loss import Goal, Losses, check_loss
from gpipe_bench.engine.runtime.mailboxes import Mailboxes
from gpipe_bench.engine.runtime.runtime import Runtime
from gpipe_bench.engine.transfer import Stream, current_stream, record_stream, wait_stream
from gpipe_bench.engine.worker import Turns, Workers, in_fresh_thread, this_thread
from gpipe_bench.errors import ScheduleError, UnsupportedError
from gpipe_bench.schedules.program import Plan, run_forward
from gpipe_bench.skip.namespace import SkipKey
from gpipe_bench.skip.trees import tree_map_only

Gather = Callable[[list[MicroBatch]], MicroBatch]


class Pipeline:
    """Runs batches through layers, which hold it and are told with each call, so that they are free as soon as dropped.

    Args:
        rows: for each partition the device of the schedule that it belongs to.
        choice: the schedule; None for the paper's executor.
    """

    def __init__(self, rows: tuple[int, ...], choice: Choice | None) -> None:
        self.rows, self.choice = rows, choice
        self._renew()

    def _renew(self) -> None:
        """Forget everything that was seen of layers, and that belongs to this process and cannot be copied."""
        self._placed: tuple[Any, list[Partition]] = None, []
        self._drawing: set[tuple[int, bool]] = set()
        self._turns: dict[tuple[bool, bool], Turns] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"rows": self.rows, "choice": self.choice}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._renew()

    def places(self, layers: Layers) -> list[Partition]:
        """The partitions, in place."""
        if self._placed[0] is not layers.partitions:
            self._renew()
            options: Any = {"portals": layers.components.portals, "transfer": layers.transfer}
            found = place(layers.partitions, layers.devices, self.rows, layers.skip_layout, **options)
            self._placed = layers.partitions, found
        return self._placed[1]

    def plan(self, layers: Layers, m: int) -> Plan[SkipKey]:
        """What a batch of m micro-batches is to do, by the settings and modes of now."""
        return Plan(
            m=m,
            n=len(layers.partitions),
            components=layers.components,
            checkpoint=layers.checkpoint if layers.training else "never",
            arrivals={each.j: each.incoming for each in self.places(layers)},
            backward=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        )

    def lists(self, plan: Plan[SkipKey]) -> ActionLists:
        """The schedule of a batch."""
        assert self.choice is not None  # noqa: S101 - asked for where there is a schedule
        return self.choice.lists(plan.m, plan.checkpointed, early_recompute=plan.components.early_recompute)

    def forward(self, layers: Layers, microbatches: list[MicroBatch], gather: Gather) -> Any:
        """What the last layer gives for micro-batches."""
        plan = self.plan(layers, len(microbatches))
        if plan.backward and (replica := active_replica()) is not None:
            check_replica(replica, layers, plan.m, whole=self.choice is None and not plan.checkpointed)
        if self.choice is None:
            return self._paper(layers, plan, microbatches, gather).unwrap()
        return gather(self.outputs(layers, plan, microbatches, Mailboxes())).unwrap()

    def outputs(
        self, layers: Layers, plan: Plan[SkipKey], microbatches: list[MicroBatch], mailboxes: Mailboxes
    ) -> list[MicroBatch]:
        """Run the forward passes of a schedule: what the last layer gives, if it is in this process.

        Args:
            layers: of the pipeline.
            plan: of the batch.
            microbatches: the batch, if the first layer is in this process.
            mailboxes: how values travel.
        """
        lists = self.lists(plan)
        if plan.backward and not lists.facts.schedule.forwards_first:
            rule = "schedule must end its forward passes before it begins its backward passes for pipe(x)"
            advice = "call pipe.step(input, target, loss), or pipe(x) under torch.no_grad()"
            raise ScheduleError([f"{rule}, got {lists.name}; {advice}"])
        end = Outputs(plan.m)
        with self._entered(layers, plan, microbatches) as batch:
            order = mailboxes.enter(batch.randomness, lists.forward)
            options: Any = {"learning": plan.backward, "mailboxes": mailboxes}
            runtime = Runtime(layers.skip_layout, list(microbatches), batch, lists, end, **options)
            runtime.run(order)
            outputs, end.microbatches = end.microbatches, []
            self._hand_over(layers, outputs, entering=False)
            mailboxes.leave(batch.randomness)
        if not plan.backward:
            return outputs
        return attach(BackwardPass(runtime, end, self._streams(layers)), microbatches, outputs)

    def step(
        self, layers: Layers, microbatches: list[MicroBatch], sizes: Sequence[int], goal: Goal, gather: Gather
    ) -> Any:
        """A training step: the loss of the batch, and its output if asked for. Empties ``microbatches``."""
        if not layers.partitions:
            raise ValueError("pipe must have a layer to train, got an empty nn.Sequential; add layers")
        if torch.is_grad_enabled() and (replica := active_replica()) is not None:
            check_no_replica(replica, layers)
        if self.choice is None:
            goal.split(layers.chunks, sizes)
            output = self.forward(layers, microbatches, gather)
            value = check_loss(goal.loss(output, goal.target))
            if value.requires_grad:
                torch.autograd.backward(value)
            loss, output = value.detach(), tree_map_only(Tensor, Tensor.detach, output)
        else:
            plan = self.plan(layers, len(sizes))
            loss, outputs = self.train(layers, plan, microbatches, sizes, goal, mailboxes=Mailboxes())
            output = gather(outputs).unwrap() if goal.return_output else None
        return (loss, output) if goal.return_output else loss

    def train(
        self,
        layers: Layers,
        plan: Plan[SkipKey],
        microbatches: list[MicroBatch],
        sizes: Sequence[int],
        goal: Goal | None,
        *,
        mailboxes: Mailboxes,
    ) -> tuple[Tensor, list[MicroBatch]]:
        """Run a batch through a schedule, forward and backward where the plan says so.

        Args:
            layers: of the pipeline.
            plan: of the batch.
            microbatches: as for :meth:`outputs`; emptied.
            sizes: of all micro-batches.
            goal: what to minimise, in the process with the last layer.
            mailboxes: how values travel.

        Returns:
            The loss of the batch, and the outputs, if the goal says so.
        """
        lists = self.lists(plan)
        shared: Any = goal.shared(layers.chunks, sizes, learning=plan.backward) if goal else (None, [], ())
        loss, targets, shares = shared
        entering = [value for microbatch in microbatches for value in microbatch.values]
        with self._entered(layers, plan, microbatches) as batch:
            order = mailboxes.enter(batch.randomness, lists.facts.order if plan.backward else lists.forward)
            end = Losses(loss, targets, shares, batch, keeps=goal is not None and goal.return_output)
            options: Any = {"learning": plan.backward, "mailboxes": mailboxes}
            runtime = Runtime(layers.skip_layout, microbatches, batch, lists, end, **options)
            microbatches.clear()
            try:
                runtime.run(order)
                total = mailboxes.leave(batch.randomness, end.total)
            finally:
                # The loss has been made on the stream of the last partition: the caller comes after it, too.
                after(self._streams(layers))
        hand_back(entering, runtime.input_grads)
        return total, end.outputs

    def _paper(self, layers: Layers, plan: Plan[SkipKey], microbatches: list[MicroBatch], gather: Gather) -> MicroBatch:
        """Run micro-batches in the paper's executor, and put the outputs together."""
        stop = threading.Event()

        def run() -> list[MicroBatch]:
            with batch.execution.applied():
                numbers = sorted({partition.worker for partition in batch.partitions})
                workers = Workers(numbers) if batch.threads else None
                executor = PaperExecutor(plan, layers.skip_layout, microbatches, batch, workers, stop)
                try:
                    run_forward(plan, executor)
                finally:
                    executor.drain()
                return executor.microbatches

        with self._entered(layers, plan, microbatches) as batch:
            outputs = in_fresh_thread(run, stop.set) if batch.threads else run()
            self._hand_over(layers, outputs, entering=False)
        output = gather(outputs)
        if not plan.checkpointed:
            return output
        own = [(computing, callers) for _, computing, callers in self._streams(layers) if computing != callers]
        return MicroBatch(behind(Guard, output.values, own), output.structure)

    @contextmanager
    def _entered(self, layers: Layers, plan: Plan[SkipKey], microbatches: list[MicroBatch]) -> Iterator[BatchContext]:
        """What the tasks of a batch share, for as long as its forward passes run."""
        places = self.places(layers)
        anew = bool(plan.checkpointed) or self.choice is not None
        entering = [value for each in microbatches for value in each.values if isinstance(value, Tensor)]
        tensors = (*entering, *layers.parameters())
        # PyTorch has not annotated it.
        if any(unpack_dual(tensor).tangent is not None for tensor in tensors):  # type: ignore[no-untyped-call]
            raise UnsupportedError(NOT_TRACED)
        if plan.backward:
            check_layers(layers, whole=not anew)
        shared = plan.m > 1 and plan.n > 1
        with layers.batch_lock, deferring(layers.deferred_layers, plan.m), uncached_weights(shared=shared, anew=anew):
            self._hand_over(layers, microbatches, entering=True)
            # Tasks draw the same random numbers in every thread.
            concurrent = plan.components.clock_cycle and shared
            aside = plan.components.copy_streams and plan.n > 1
            # Without the clock-cycle, or with nothing to run beside, the calling thread issues every task.
            threads = layers.workers != "never" and plan.components.clock_cycle and plan.n > 1
            mode = layers.training, threads
            turns = self._turns.get(mode) or self._turns.setdefault(mode, Turns())
            options: Any = {"concurrent": concurrent, "training": layers.training}
            randomness = BatchRandomness(layers.devices, layers.partitions, self._drawing, turns, **options)
            before, this_thread.locks = this_thread.locks, (*this_thread.locks, layers.batch_lock)
            try:
                yield BatchContext(
                    components=plan.components,
                    transfer=layers.transfer,
                    execution=ExecutionContext.capture(layers.devices),
                    randomness=randomness,
                    threads=threads,
                    turns=turns,
                    observer=layers.task_observer,
                    partitions=places,
                    ends=[each.endpoints(plan.m, each.computing(), copy_streams=aside) for each in places],
                    trained=[any(weight.requires_grad for weight in each.layers.parameters()) for each in places],
                )
            finally:
                this_thread.locks = before
                randomness.end()

    def _streams(self, layers: Layers) -> list[tuple[torch.device, Stream, Stream]]:
        """For each partition its device, its compute stream, and the caller's stream on the device."""
        return [(each.device, each.computing(), current_stream(each.device)) for each in self.places(layers)]

    def _hand_over(self, layers: Layers, microbatches: list[MicroBatch], *, entering: bool) -> None:
        """Order partitions with compute streams of their own after the caller's work, or the caller after them."""
        for _, computing, callers in self._streams(layers):
            if entering:
                wait_stream(computing, callers)
            else:
                wait_stream(callers, computing)
        end = self.places(layers)[0 if entering else -1]
        if end.own_stream is not None:
            user = end.own_stream if entering else current_stream(end.device)
            for microbatch in microbatches:
                for value in microbatch.values:
                    if isinstance(value, Tensor):
                        record_stream(value, user)


def hand_back(entering: Sequence[Any], grads: Sequence[Sequence[Tensor | None]]) -> None:
    """Give the flat values of all micro-batches their gradients."""
    flat = [grad for each in grads for grad in each]
    pairs = [(value, grad) for value, grad in zip(entering, flat, strict=False) if grad is not None]
    if pairs:
        torch.autograd.backward([value for value, _ in pairs], [grad for _, grad in pairs])
