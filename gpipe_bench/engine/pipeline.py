"""A pipeline: partitions in place, and the executor that runs batches through them, which is chosen once.

The paper's executor follows torchgpipe (Kim et al., arXiv 2004.09910), which brought GPipe (Huang et al., arXiv
1811.06965) to PyTorch. The runtime runs any schedule. How a batch is cut into micro-batches, how their results are put
together and where layers are is up to the modules that hold a pipeline: :class:`gpipe_bench.engine.gpipe.GPipe`,
:class:`gpipe_bench.engine.pipe.Pipe` and :class:`gpipe_bench.distributed.Pipe`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from gpipe_bench.autograd.microbatch import MicroBatch
from gpipe_bench.components import Components
from gpipe_bench.engine.batchnorm import deferring
from gpipe_bench.engine.context import ExecutionContext, uncached_weights
from gpipe_bench.engine.goal import Goal
from gpipe_bench.engine.microbatches import Cut
from gpipe_bench.engine.module import NOT_TRACED, PartitionedModule
from gpipe_bench.engine.observer import Observer
from gpipe_bench.engine.partition import Partition, put_in_place
from gpipe_bench.engine.randomness import BatchRandomness
from gpipe_bench.engine.replicas import active_replica, check_layers, check_no_replica, check_replica
from gpipe_bench.engine.tied import Copies, find_ties
from gpipe_bench.engine.transfer import Endpoint, Route, Stream, current_stream, record_stream, wait_stream
from gpipe_bench.engine.worker import Turns, this_thread
from gpipe_bench.errors import UnsupportedError
from gpipe_bench.schedules.program import Plan
from gpipe_bench.skip.layout import SkipCopy


class Executor(Protocol):
    """Runs batches: :class:`gpipe_bench.engine.paper.executor.PaperExecutor`, or the runtime's."""

    def forward(self, batch: Batch) -> Any:
        """What the last layer gives, with a graph where the plan of the batch has a backward pass."""

    def step(self, batch: Batch, goal: Goal) -> tuple[Tensor, Any]:
        """Run forward and backward: the loss of the batch, and its output if the goal asks for it; without a graph."""


class Pipeline:
    """Runs batches through a module, which holds it and is told with each call: so it is free as soon as dropped.

    Args:
        executor: what runs the batches.
        ranks: for each partition the device of the schedule that it belongs to.
        processes: whether each rank is a process.
    """

    def __init__(self, executor: Executor, ranks: tuple[int, ...], *, processes: bool = False) -> None:
        self.executor, self.ranks, self._processes = executor, ranks, processes
        self.reset_process_state()

    def reset_process_state(self) -> None:
        """Forget everything that was seen of layers, and that belongs to this process and cannot be copied."""
        self._seen = SeenLayers()
        self._in_place: tuple[Any, list[Partition]] = None, []

    def __getstate__(self) -> dict[str, Any]:
        return {"executor": self.executor, "ranks": self.ranks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]  # of this class alone

    def plan(self, module: PartitionedModule, m: int) -> Plan[SkipCopy]:
        """What a batch of m micro-batches is to do, by the settings and modes of now."""
        if self._in_place[0] is not module.partitions:
            self.reset_process_state()
            options: Any = {"transfer": module.transfer, "processes": self._processes}
            found = put_in_place(
                module.partitions, module.devices, self.ranks, module.skip_layout, module.components, **options
            )
            self._in_place = module.partitions, found
        return Plan(
            m=m,
            n=len(module.partitions),
            components=module.components,
            checkpoint=module.checkpoint if module.training else "never",
            arrivals={each.j: each.skips.incoming for each in self._in_place[1]},
            backward=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        )

    def batch(self, module: PartitionedModule, cut: Cut) -> Batch:
        """A batch, ready for the executor."""
        plan = self.plan(module, len(cut.sizes))
        return Batch(module, self._in_place[1], self._seen, plan, cut)

    def step(self, module: PartitionedModule, cut: Cut, goal: Goal) -> Any:
        """A training step: the loss of the batch, and its output if asked for. Empties the micro-batches."""
        if not module.partitions:
            raise ValueError("pipe must have a layer to train, got an empty nn.Sequential; add layers")
        if torch.is_grad_enabled() and (replica := active_replica()) is not None:
            check_no_replica(replica, module)
        loss, output = self.executor.step(self.batch(module, cut), goal)
        return (loss, output) if goal.return_output else loss


class SeenLayers:
    """What batches have shown of the layers of a pipeline, for the batches after them.

    Attributes:
        drawing: (j, training) of partitions that have drawn random numbers, or may have.
        turns: by (training, threads), whether tasks take turns.
    """

    def __init__(self) -> None:
        self.drawing: set[tuple[int, bool]] = set()
        self.turns: defaultdict[tuple[bool, bool], Turns] = defaultdict(Turns)


class Batch:
    """One batch, for as long as a call of the pipeline lasts.

    Args:
        module: the layers.
        partitions: in place.
        seen: of these layers.
        plan: what the batch is to do.
        cut: its micro-batches, whose fields are attributes of the batch, too.

    Attributes:
        streams: for each partition its device, its compute stream, and the caller's stream on the device.
    """

    def __init__(
        self, module: PartitionedModule, partitions: list[Partition], seen: SeenLayers, plan: Plan[SkipCopy], cut: Cut
    ) -> None:
        self.module, self.partitions, self.plan, self._seen = module, partitions, plan, seen
        self.microbatches, self.sizes, self.chunks, self.gather = cut.microbatches, cut.sizes, cut.chunks, cut.gather
        self.streams: list[tuple[torch.device, Stream, Stream]] = []
        for each in partitions:
            callers = current_stream(each.device)
            self.streams.append((each.device, each.own_stream or callers, callers))

    @contextmanager
    def context(self, *, whole: bool) -> Iterator[BatchContext]:
        """What the tasks share, for as long as the forward passes run. No other batch of the module runs meanwhile.

        Args:
            whole: whether autograd runs backward once, through one graph of all tasks.

        Raises:
            UnsupportedError: a forward-mode derivative is taken, or DistributedDataParallel does not average gradients.
            ValueError: layers average their gradients themselves, and ``whole`` is False.
        """
        module, plan = self.module, self.plan
        entering = [value for each in self.microbatches for value in each.values if isinstance(value, Tensor)]
        weights = [[*each.layers.parameters()] for each in self.partitions]
        # PyTorch has not annotated it.
        if any(unpack_dual(tensor).tangent is not None for tensor in chain(entering, *weights)):  # type: ignore[no-untyped-call]
            raise UnsupportedError(NOT_TRACED)
        if plan.backward and not whole and dist.is_available() and dist.is_initialized():
            check_layers(module)
            if (replica := active_replica()) is not None:
                check_replica(replica, module, plan.m)
        shared = plan.m > 1 and plan.n > 1
        deferred = deferring(module.deferred_layers, plan.m) if module.deferred_layers else nullcontext()
        with module.batch_lock, deferred, uncached_weights(shared=shared, anew=not whole):
            ties, found = module.ties, [getattr(weight, "tied_to", weight) for own in weights for weight in own]
            if ties is None and len({*found}) < len(found):
                ties = find_ties(module.partitions)
            copies = Copies(ties, self.partitions, learning=plan.backward, whole=whole) if ties else None
            self.order_streams(self.microbatches, entering=True)
            # Without the clock-cycle, or with nothing to run beside, the calling thread issues every task. Tasks draw
            # the same random numbers in every thread.
            threads = module.workers != "never" and plan.components.clock_cycle and plan.n > 1
            turns = self._seen.turns[module.training, threads]
            randomness = BatchRandomness(
                module.devices,
                module.partitions,
                self._seen.drawing,
                turns,
                concurrent=plan.components.clock_cycle and shared,
                training=module.training,
            )
            aside = plan.components.copy_streams and plan.n > 1
            before, this_thread.locks = this_thread.locks, (*this_thread.locks, module.batch_lock)
            try:
                yield BatchContext(
                    components=plan.components,
                    transfer=module.transfer,
                    execution=ExecutionContext.capture(module.devices),
                    randomness=randomness,
                    threads=threads,
                    turns=turns,
                    observer=module.task_observer,
                    partitions=self.partitions,
                    copies=copies,
                    streams=[
                        each.endpoints(plan.m, computing, copy_streams=aside)
                        for each, (_, computing, _) in zip(self.partitions, self.streams, strict=True)
                    ],
                    trained=[any(weight.requires_grad for weight in own) for own in weights],
                )
            finally:
                this_thread.locks = before
                randomness.end()

    def order_streams(self, microbatches: list[MicroBatch], *, entering: bool) -> None:
        """Order partitions with compute streams of their own after the caller's work, or the caller after them."""
        for _, computing, callers in self.streams:
            if entering:
                wait_stream(computing, callers)
            else:
                wait_stream(callers, computing)
        end = self.partitions[0 if entering else -1]
        if end.own_stream is not None:
            user = end.own_stream if entering else current_stream(end.device)
            for microbatch in microbatches:
                for value in microbatch.values:
                    if isinstance(value, Tensor):
                        record_stream(value, user)


@dataclass(frozen=True, slots=True)
class BatchContext:
    """What all tasks of one batch share, also those of its backward pass. It knows neither the module nor the batch.

    Attributes:
        components: which components are on.
        transfer: ``direct`` or ``host``.
        execution: the caller's thread-local modes.
        randomness: the batch's random numbers.
        threads: whether tasks run in threads of their own.
        turns: whether tasks take turns.
        observer: told of every task, if any.
        partitions: in place.
        copies: of tied weights, if there are any.
        streams: where the copies of each partition begin or end, a list by micro-batch.
        trained: whether each partition has something to learn. If it has not, and no input of a task needs a gradient,
            the task is no checkpoint: nothing would be recomputed.
    """

    components: Components
    transfer: str
    execution: ExecutionContext
    randomness: BatchRandomness
    threads: bool
    turns: Turns
    observer: Observer | None
    partitions: list[Partition]
    copies: Copies | None
    streams: list[list[Endpoint]]
    trained: list[bool]

    def route(self, kind: str, i: int, source: int, target: int) -> Route | None:
        """How a ``copy`` or ``portal`` takes micro-batch i from partition to partition.

        None where nothing is copied: within one device, unless through the host to another rank.
        """
        here, there = self.partitions[source], self.partitions[target]
        if here.device == there.device and (self.transfer == "direct" or here.rank == there.rank):
            return None
        return Route(kind, self.streams[source][i], self.streams[target][i], i, target, self.transfer, self.observer)
