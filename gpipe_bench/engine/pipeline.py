"""A pipeline: layers in partitions, each on its device, and a batch on its way through them.

The engine follows torchgpipe (Kim et al., arXiv 2004.09910), which brought GPipe (Huang et al., arXiv 1811.06965) to
PyTorch. What differs, and why, stands in the modules of this package. How a batch is cut into micro-batches, and what
is made of their results, is up to the classes that users see: :class:`gpipe_bench.engine.gpipe.GPipe` and
:class:`gpipe_bench.engine.pipe.Pipe`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from gpipe_bench.components import Components
from gpipe_bench.engine.ambience import Ambience
from gpipe_bench.engine.arguments import (
    check_arguments,
    check_collection,
    check_components,
    resolve_devices,
)
from gpipe_bench.engine.autograd import can_renumber, ranked_lanes
from gpipe_bench.engine.autograd_lanes import AutogradLanes
from gpipe_bench.engine.batchnorm import DeferredBatchNorm, convert_deferred_batch_norm, deferring
from gpipe_bench.engine.checkpoint import guard
from gpipe_bench.engine.granularity import Contest, Contests, kind_of, timed, undisturbed
from gpipe_bench.engine.lanes import Circumstances
from gpipe_bench.engine.layers import Layers
from gpipe_bench.engine.microbatch import MicroBatch
from gpipe_bench.engine.microbatch_lanes import MicroBatchLanes, graph_starts
from gpipe_bench.engine.observer import Observer
from gpipe_bench.engine.randomness import Batch, Randomness
from gpipe_bench.engine.scheduled import BackwardPass, attach
from gpipe_bench.engine.scheduled_lanes import ScheduledLanes
from gpipe_bench.engine.skip.layout import SkipLayout, inspect_skip_layout, verify_skippables
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.stage import Stage, place
from gpipe_bench.engine.streams import Stream, current_stream, record_stream, wait_stream
from gpipe_bench.engine.unmovable import Device, Unmovable
from gpipe_bench.engine.weights import uncached_weights
from gpipe_bench.engine.worker import WorkerPool, working
from gpipe_bench.program import Plan, run_forward

__all__ = ["Device", "Pipeline"]


class Pipeline(Layers, Unmovable):
    """Partitions of an nn.Sequential in place.

    Args:
        module: layers to split; moved to the devices in place.
        balance: layers per partition.
        devices: one per partition.
        chunks: micro-batches to split a batch into.
        checkpoint: ``always``, ``except_last`` or ``never``.
        deferred_batch_norm: replace layers of batch normalisation.
        components: which components of the engine are on.
        backward: what drives the backward pass.
        transfer: how tensors cross partitions.
        workers: who runs the tasks.
        container: class of the partitions.

    Raises:
        TypeError, ValueError, IndexError: see :class:`gpipe_bench.engine.gpipe.GPipe`.
    """

    _layout: SkipLayout
    _deferred: list[DeferredBatchNorm]
    _stages: list[Stage]
    _randomness: Randomness
    _observer: Observer | None
    _lock: threading.Lock
    _pool: WorkerPool
    _contests: Contests

    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None,
        *,
        devices: Sequence[Device] | None,
        chunks: int,
        checkpoint: str,
        deferred_batch_norm: bool,
        components: Components | None,
        backward: str,
        transfer: str,
        workers: str,
        container: type[nn.Sequential] = nn.Sequential,
    ) -> None:
        super().__init__()
        balance = check_collection("balance", balance, "a list of layers per partition, such as [2, 2]")
        devices = check_collection("devices", devices, "a list of devices, one per partition, such as ['cuda:0']")
        check_components(components)
        self.balance, self.chunks = check_arguments(
            module,
            balance,
            chunks=chunks,
            checkpoint=checkpoint,
            backward=backward,
            transfer=transfer,
            workers=workers,
            deferred_batch_norm=deferred_batch_norm,
        )
        verify_skippables(module)
        self.devices = resolve_devices(devices, len(self.balance))
        self.checkpoint = checkpoint
        self.components = components or Components()
        self.backward_mode = backward
        self.transfer = transfer
        self.workers = workers
        self.deferred_batch_norm = deferred_batch_norm
        self._arrange(module, container)
        self._prepare()

    def _arrange(self, module: nn.Sequential, container: type[nn.Sequential]) -> None:
        """Make partitions of the layers of ``module``."""
        if self.deferred_batch_norm:
            convert_deferred_batch_norm(module)
        self._take(module, container)
        layout = inspect_skip_layout(self.partitions)
        deferred = [layer for layer in module.modules() if isinstance(layer, DeferredBatchNorm)]
        self.__dict__.update(_layout=layout, _deferred=deferred)

    def _settle(self) -> None:
        """Let those layers run that are registered now: since the last batch some may have been replaced.

        Raises:
            TypeError: skips do not match.
            ValueError: see :meth:`Layers._replaced`.
        """
        with self._lock:
            module = self._replaced()
            if module is None:
                return
            verify_skippables(module)
            self._arrange(module, type(self.partitions[0]))
            stages = place(self.partitions, self.devices, self._layout, self.components, self.transfer)
            for stage, before in zip(stages, self._stages, strict=True):
                stage.own_stream, stage.copying = before.own_stream, before.copying
            self.__dict__.update(_stages=stages, _randomness=Randomness(self.devices), _contests=Contests())

    def _prepare(self) -> None:
        """Everything that belongs to this process and cannot be copied or pickled."""
        self.__dict__.update(
            _stages=place(self.partitions, self.devices, self._layout, self.components, self.transfer),
            _randomness=Randomness(self.devices),
            _observer=None,
            _lock=threading.Lock(),
            _pool=WorkerPool(),
            _contests=Contests(),
        )

    def __getstate__(self) -> dict[str, Any]:
        process_bound = {"_stages", "_randomness", "_observer", "_lock", "_pool", "_contests"}
        return {key: value for key, value in self.__dict__.items() if key not in process_bound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({"workers": "auto", **state})  # type: ignore[no-untyped-call]  # not annotated in PyTorch
        self._prepare()

    def _through(self, microbatches: list[MicroBatch], gather: Callable[[list[MicroBatch]], MicroBatch]) -> Any:
        """Run micro-batches through the partitions.

        Args:
            microbatches: what enters.
            gather: puts together what comes out.
        """
        with self._lock:
            plan = self._plan(len(microbatches))
            shared = plan.m > 1 and plan.n > 1
            scheduled = self._schedules(plan)
            anew = plan.checkpoints(0) or scheduled
            with deferring(self._deferred), uncached_weights(shared=shared, anew=anew):
                results = self._run(plan, microbatches)
        output = gather(results)
        guarded = plan.checkpoints(0) and not scheduled
        values = guard(output.values, self._own_streams()) if guarded else output.values
        return MicroBatch(values, output.structure).unwrap()

    def _schedules(self, plan: Plan[SkipKey]) -> bool:
        """Whether the engine is to drive a backward pass; one partition on the CPU has autograd's order anyway."""
        alone = plan.n == 1 and self.devices[0].type == "cpu" and not plan.checkpointed
        return self.backward_mode == "scheduled" and plan.backward and not alone

    def _own_streams(self) -> list[tuple[Stream, Stream]]:
        """Compute streams that partitions have of their own, each with the caller's on the same device."""
        own = [stage for stage in self._stages if stage.own_stream is not None]
        return [(stage.own_stream, current_stream(stage.device)) for stage in own]

    def _plan(self, m: int) -> Plan[SkipKey]:
        return Plan(
            m=m,
            n=len(self.partitions),
            components=self.components,
            checkpoint=self.checkpoint if self.training else "never",
            arrivals={j: self._layout.arrivals(j) for j in range(len(self.partitions))},
            backward=torch.is_grad_enabled() and not torch.is_inference_mode_enabled(),
        )

    def _run(self, plan: Plan[SkipKey], microbatches: list[MicroBatch]) -> list[MicroBatch]:
        # Without the clock-cycle, or with nothing to run beside, the calling thread issues every task.
        indices = sorted({stage.worker for stage in self._stages}) if plan.components.clock_cycle and plan.n > 1 else []
        concurrent = plan.m > 1 and len(indices) > 1
        randomness = self._randomness.begin(concurrent=concurrent, training=self.training)
        scheduled = self._schedules(plan)
        ambience = Ambience.capture(self.devices)
        forward, backward = self._contests_of(plan, microbatches, randomness) if indices else (None, None)
        inline = forward.inline() if forward is not None else self.workers == "never"
        back = self.workers == "never" or (backward is not None and backward.inline())
        # Nodes that workers make are numbered by each for itself: in one graph autograd's order would hang on that.
        alone = (not indices or (inline and back)) and self._observer is None
        self._hand_over(microbatches, entering=True)
        with ExitStack() as stack, timed(forward, inline=inline):
            stack.callback(randomness.end)
            lend = self._pool.lend if scheduled else working
            shared = Circumstances(
                components=self.components,
                transfer=self.transfer,
                ambience=ambience,
                randomness=randomness,
                observer=self._observer,
                workers=stack.enter_context(lend(indices)) if indices and not inline else None,
                checkpointed=plan.checkpointed,
                ranked=bool(indices) and not scheduled,
            )
            stack.enter_context(ranked_lanes(ranked=shared.ranked))
            lanes = self._lanes(plan, microbatches, shared, scheduled=scheduled, in_turn=alone)
            run_forward(self._looking_ahead(plan, shared) if scheduled else plan, lanes)
        # Lanes that drive a backward pass live until it is over; what they gave out need not.
        outputs, lanes.microbatches = lanes.microbatches, []
        self._hand_over(outputs, entering=False)
        if isinstance(lanes, AutogradLanes):
            return outputs
        workers = [stage.worker for stage in self._stages] if indices and self.workers != "never" else []
        driven = BackwardPass(plan, lanes, self._places(), workers, self._pool.lend, contest=backward)
        return attach(driven, microbatches, outputs)

    def _looking_ahead(self, plan: Plan[SkipKey], shared: Circumstances) -> Plan[SkipKey]:
        """``plan`` as workers are to run it, which on the CPU need not wait for the slowest of them in every cycle."""
        cpu = all(device.type == "cpu" for device in self.devices)
        return replace(plan, looks_ahead=cpu and shared.workers is not None)

    def _lanes(
        self,
        plan: Plan[SkipKey],
        microbatches: list[MicroBatch],
        shared: Circumstances,
        *,
        scheduled: bool,
        in_turn: bool,
    ) -> AutogradLanes | ScheduledLanes | MicroBatchLanes:
        """Lanes for a batch; ``in_turn``: one thread runs all tasks, which nobody observes."""
        common = self._stages, self._layout, microbatches, shared
        if not scheduled:
            return AutogradLanes(*common)
        starts = graph_starts(plan, self._stages, self._layout, self.transfer, self.training) if in_turn else None
        return ScheduledLanes(*common) if starts is None else MicroBatchLanes(*common, starts)

    def _contests_of(
        self, plan: Plan[SkipKey], microbatches: list[MicroBatch], randomness: Batch
    ) -> tuple[Contest | None, Contest | None]:
        """The contests that decide who runs a batch, forward and backward; none where it must not be the caller."""
        if self.backward_mode == "autograd" and not can_renumber():
            return None, None
        if self.workers != "auto" or self._observer is not None or randomness.nested or not undisturbed():
            return None, None
        kind = (plan.checkpoint, plan.backward, self.training, kind_of(microbatches))
        return self._contests.of(kind, plan.m + plan.n - 1, plan.m * plan.n)

    def settled_workers(self) -> str:
        """``workers``, or, where that is ``auto``, the choice that does the same as the batches so far have come to."""
        return self._contests.settled() if self.workers == "auto" else self.workers

    def _places(self) -> list[tuple[torch.device, Stream, Stream]]:
        """For each partition its device, its compute stream, and the caller's stream on the device."""
        return [(stage.device, stage.computing(), current_stream(stage.device)) for stage in self._stages]

    def _hand_over(self, microbatches: list[MicroBatch], *, entering: bool) -> None:
        """Order partitions with compute streams of their own after the caller's work, or the caller after them."""
        end = self._stages[0] if entering else self._stages[-1]
        for own, callers in self._own_streams():
            if entering:
                wait_stream(own, callers)
            else:
                wait_stream(callers, own)
        if end.own_stream is not None:
            user = end.own_stream if entering else current_stream(end.device)
            for microbatch in microbatches:
                for value in microbatch.values:
                    if isinstance(value, torch.Tensor):
                        record_stream(value, user)

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Let ``observer`` see every task of the batches in this block, forward and backward."""
        previous = self._observer
        self.__dict__["_observer"] = observer
        try:
            yield
        finally:
            self.__dict__["_observer"] = previous
