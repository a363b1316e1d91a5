"""Torch lanes: the forward program carried out with tensors, streams, workers and autograd functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from gpipe_bench.components import Components
from gpipe_bench.engine.ambience import Ambience
from gpipe_bench.engine.autograd import set_rank, skip_ranks
from gpipe_bench.engine.checkpoint import Slot, checkpoint, recompute
from gpipe_bench.engine.dependency import fork, join
from gpipe_bench.engine.holding import Holding
from gpipe_bench.engine.marks import run_marked
from gpipe_bench.engine.microbatch import MicroBatch, Values, differentiable
from gpipe_bench.engine.observer import Observer, Task, observed
from gpipe_bench.engine.randomness import Batch, Draws
from gpipe_bench.engine.skip.layout import SkipLayout
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.stage import PartitionTask, Stage
from gpipe_bench.engine.streams import Stream, use_stream
from gpipe_bench.engine.transfer import Endpoint, Route, copy, wait
from gpipe_bench.engine.worker import Result, Workers

__all__ = ["Circumstances", "TorchLanes"]


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What all tasks of one batch share.

    Attributes:
        components: which components are on.
        transfer: ``direct`` or ``host``.
        ambience: the caller's thread-local modes.
        randomness: the batch's random numbers.
        observer: told of every task, if any.
        workers: None to issue every task from the calling thread.
    """

    components: Components
    transfer: str
    ambience: Ambience
    randomness: Batch
    observer: Observer | None
    workers: Workers | None


@dataclass(slots=True)
class _Running:
    """A task between launch and leave."""

    task: PartitionTask
    inputs: Values
    slot: Slot | None
    result: Result | None = None


class TorchLanes:
    """Carries out the steps of :mod:`gpipe_bench.program` for one batch.

    Args:
        stages: the partitions.
        layout: the skips between them.
        microbatches: the micro-batches; replaced by what each partition makes of them.
        shared: what all tasks share.
    """

    def __init__(
        self, stages: Sequence[Stage], layout: SkipLayout, microbatches: list[MicroBatch], shared: Circumstances
    ) -> None:
        self._stages = stages
        self._layout = layout
        self.microbatches = microbatches
        self._shared = shared
        self._holding = Holding()
        self._computing = [stage.computing() for stage in stages]
        # skips on their way, per micro-batch
        self._skips: list[dict[SkipKey, Tensor | None]] = [{} for _ in microbatches]
        # phonies: of open lanes by (i, j), and of the lane that micro-batch i is about to be tied to
        self._lanes: dict[tuple[int, int], Tensor | None] = {}
        self._entering: list[Tensor | None] = [None] * len(microbatches)
        self._running: dict[tuple[int, int], _Running] = {}
        self._collected = 0
        self._checkpointed = False

    # --- fence ---------------------------------------------------------------------------------------------------

    def join(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.join`; the next node of micro-batch i takes the phony."""
        self._entering[i] = self._lanes.pop((i - 1, j), None)

    def portal(self, i: int, j: int, skip: SkipKey) -> None:
        """See :meth:`gpipe_bench.program.Lanes.portal`."""
        tensor = self._skips[i][skip]
        route = self._route("portal", i, self._layout.routes[skip][0], j)
        if tensor is not None and route.moves:
            (self._skips[i][skip],) = copy(route, (tensor,))

    def copy(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.copy`."""
        route = self._route("copy", i, j - 1, j)
        if route.moves:
            riding = [] if self._shared.components.portals else self._stages[j].incoming
            flat = self._flat(i, riding)
            phony = None
            if differentiable(flat):  # else no gradient copy will end the lane: it goes on to the task
                phony, self._entering[i] = self._entering[i], None
            self._put(i, copy(route, flat, phony), riding)

    # --- compute -------------------------------------------------------------------------------------------------

    def await_copy(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.await_copy`."""
        end, stage = self._endpoint(i, j), self._stages[j]
        self._put(i, wait(end.computing, end.copying, self._flat(i, stage.incoming), end.copying), stage.incoming)

    def launch(self, i: int, j: int, *, checkpoint: bool) -> None:
        """See :meth:`gpipe_bench.program.Lanes.launch`."""
        stage = self._stages[j]
        microbatch = self.microbatches[i]
        task = PartitionTask(stage, len(microbatch.values), microbatch.structure)
        flat = self._flat(i, stage.incoming)
        for key in stage.incoming:
            del self._skips[i][key]
        draws = self._shared.randomness.draws(i, j)
        phony, self._entering[i] = self._entering[i], None
        if checkpoint and (differentiable(flat) or any(p.requires_grad for p in stage.layers.parameters())):
            # Nothing that the graph keeps may know the lanes, which keep the graph: Python does not see through it.
            name = partial(_task, i, j, stage.device, self._computing[j])
            slot = Slot(task.keeping_inputs, self._shared.ambience, draws, name, self._shared.observer)
            running = _Running(task, flat, slot)
            self._checkpointed = True
            job = partial(self._run_checkpointed, i, j, slot, flat, phony)
        else:
            if phony is not None:
                count = len(microbatch.values)
                with use_stream(self._computing[j]):
                    flat = (*join(flat[:count], phony), *flat[count:])
            running = _Running(task, (), None)
            job = partial(self._run_plain, i, j, task, flat, draws)
        self._running[i, j] = running
        self._issue(stage, running, job)

    def collect(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.collect`."""
        running = self._running[i, j]
        flat = self._result(running, j)
        outgoing = self._stages[j].outgoing
        values = flat[: len(flat) - len(outgoing)]
        self.microbatches[i] = MicroBatch(values, running.task.output_structure)
        self._skips[i].update(zip(outgoing, flat[len(values) :], strict=True))
        if running.slot is None:
            del self._running[i, j]
        elif self._shared.workers is not None:
            set_rank(flat, self._collected)
        self._collected += 1

    # --- leave ---------------------------------------------------------------------------------------------------

    def await_compute(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.await_compute`."""
        end, stage = self._endpoint(i, j), self._stages[j]
        self._put(i, wait(end.copying, end.computing, self._flat(i, stage.outgoing), end.copying), stage.outgoing)

    def recompute(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.recompute`."""
        running = self._running.pop((i, j), None)
        if running is not None and running.slot is not None:
            stage = self._stages[j]
            flat = self._flat(i, stage.outgoing)
            self._put(i, recompute(running.slot, running.inputs, flat, self._leaving(i, j)), stage.outgoing)

    def fork(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.fork`."""
        stage = self._stages[j]
        with use_stream(self._leaving(i, j)):
            flat, self._lanes[i, j] = fork(self._flat(i, stage.outgoing))
        self._put(i, flat, stage.outgoing)

    def drain(self, tasks: Iterable[tuple[int, int]]) -> None:
        """See :meth:`gpipe_bench.program.Lanes.drain`."""
        if self._shared.workers is not None:
            for _, j in tasks:
                self._shared.workers.collect(self._stages[j].worker)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _flat(self, i: int, skips: Sequence[SkipKey]) -> Values:
        return (*self.microbatches[i].values, *(self._skips[i][key] for key in skips))

    def _put(self, i: int, flat: Values, skips: Sequence[SkipKey]) -> None:
        count = len(flat) - len(skips)
        self.microbatches[i] = MicroBatch(flat[:count], self.microbatches[i].structure)
        self._skips[i].update(zip(skips, flat[count:], strict=True))

    def _endpoint(self, i: int, j: int) -> Endpoint:
        return self._stages[j].endpoint(i, self._computing[j], copy_streams=self._shared.components.copy_streams)

    def _leaving(self, i: int, j: int) -> Stream:
        """The stream on which gradients of (i, j) arrive."""
        end = self._endpoint(i, j)
        return end.copying if j < len(self._stages) - 1 else end.computing

    def _route(self, kind: str, i: int, source: int, target: int) -> Route:
        shared = self._shared
        ends = self._endpoint(i, source), self._endpoint(i, target)
        return Route(kind, *ends, i, target, shared.transfer, shared.observer, self._holding)

    def _task(self, i: int, j: int, kind: str) -> Task:
        return _task(i, j, self._stages[j].device, self._computing[j], kind)

    def _issue(self, stage: Stage, running: _Running, job: Callable[[], Values]) -> None:
        if self._shared.workers is not None:
            self._shared.workers.submit(stage.worker, job)
        else:
            running.result = job(), None

    def _result(self, running: _Running, j: int) -> Values:
        if running.result is None and self._shared.workers is not None:
            running.result = self._shared.workers.collect(self._stages[j].worker)
        (flat, error), running.result = running.result or ((), None), None
        if error is not None:
            raise error
        values: Values = flat
        return values

    def _run_checkpointed(self, i: int, j: int, slot: Slot, flat: Values, phony: Tensor | None) -> Values:
        with use_stream(self._computing[j]), observed(self._shared.observer, self._task(i, j, "forward")) as outputs:
            outputs.extend(checkpoint(slot, flat, phony))
        return tuple(outputs)

    def _run_plain(self, i: int, j: int, task: PartitionTask, flat: Values, draws: Draws) -> Values:
        shared = self._shared
        if shared.workers is not None and self._checkpointed:
            skip_ranks(len(self.microbatches) * len(self._stages))
        with use_stream(self._computing[j]), shared.ambience.applied():
            if shared.observer is None:
                return self._first_pass(i, j, draws, task, flat)
            run = partial(self._first_pass, i, j, draws, task)
            return run_marked(shared.observer, self._task(i, j, "backward"), run, flat)

    def _first_pass(self, i: int, j: int, draws: Draws, task: PartitionTask, flat: Values) -> Values:
        with observed(self._shared.observer, self._task(i, j, "forward")) as outputs, draws.first_pass(again=False):
            outputs.extend(task(flat))
        return tuple(outputs)


def _task(i: int, j: int, device: torch.device, stream: Stream, kind: str) -> Task:
    return Task(kind, i, j, device, stream, "compute")
