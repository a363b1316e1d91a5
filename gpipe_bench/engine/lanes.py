"""What the lanes of both backward modes share: tensors on their way, streams, and tasks on their workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from gpipe_bench.components import Components
from gpipe_bench.engine.ambience import Ambience
from gpipe_bench.engine.checkpoint import Slot
from gpipe_bench.engine.holding import Holding
from gpipe_bench.engine.microbatch import MicroBatch, Values, differentiable
from gpipe_bench.engine.observer import Observer, Task
from gpipe_bench.engine.randomness import Batch, Draws
from gpipe_bench.engine.skip.layout import SkipLayout
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.stage import PartitionTask, Stage
from gpipe_bench.engine.streams import Stream
from gpipe_bench.engine.transfer import Route
from gpipe_bench.engine.worker import Result, Workers, result_of

__all__ = ["BatchLanes", "Circumstances", "name_task"]


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
        checkpointed: how many micro-batches are checkpointed.
        ranked: whether nodes are ranked as those of workers are, see :mod:`gpipe_bench.engine.autograd`.
    """

    components: Components
    transfer: str
    ambience: Ambience
    randomness: Batch
    observer: Observer | None
    workers: Workers | None
    checkpointed: int
    ranked: bool


class BatchLanes:
    """One batch on its way through the partitions.

    Args:
        stages: the partitions.
        layout: the skips between them.
        microbatches: the micro-batches; replaced by what each partition makes of them.
        shared: what all tasks share.
    """

    def __init__(
        self, stages: Sequence[Stage], layout: SkipLayout, microbatches: list[MicroBatch], shared: Circumstances
    ) -> None:
        self.microbatches = microbatches
        self._stages = stages
        self._layout = layout
        self._shared = shared
        self._holding = Holding()
        self._computing = [stage.computing() for stage in stages]
        aside = shared.components.copy_streams and len(stages) > 1
        ends = zip(stages, self._computing, strict=True)
        # by partition and micro-batch: looked up several times per task
        self._ends = [stage.endpoints(len(microbatches), own, copy_streams=aside) for stage, own in ends]
        # skips on their way, per micro-batch
        self._skips: list[dict[SkipKey, torch.Tensor | None]] = [{} for _ in microbatches]
        self._results: dict[tuple[int, int], Result] = {}
        self._trained: dict[int, bool] = {}

    def drain(self) -> None:
        """See :meth:`gpipe_bench.program.Lanes.drain`."""
        self._results.clear()
        if self._shared.workers is not None:
            self._shared.workers.end()

    # --- tensors on their way --------------------------------------------------------------------------------------

    def _flat(self, i: int, skips: Sequence[SkipKey]) -> Values:
        values = self.microbatches[i].values
        return (*values, *[self._skips[i][key] for key in skips]) if skips else values

    def _put(self, i: int, flat: Values, skips: Sequence[SkipKey]) -> None:
        if not skips:
            self.microbatches[i] = MicroBatch(flat, self.microbatches[i].structure)
            return
        count = len(flat) - len(skips)
        self.microbatches[i] = MicroBatch(flat[:count], self.microbatches[i].structure)
        self._skips[i].update(zip(skips, flat[count:], strict=True))

    def _riding(self, j: int) -> list[SkipKey]:
        """Skips that a copy to partition j takes along."""
        return [] if self._shared.components.portals else self._stages[j].incoming

    # --- tasks -----------------------------------------------------------------------------------------------------

    def _enter(self, i: int, j: int) -> tuple[PartitionTask, Values]:
        """Task (i, j) and its flat inputs, which nobody else keeps."""
        stage, microbatch = self._stages[j], self.microbatches[i]
        flat = self._flat(i, stage.incoming)
        for key in stage.incoming:
            del self._skips[i][key]
        return PartitionTask(stage, len(microbatch.values), microbatch.structure), flat

    def _exit(self, i: int, j: int, task: PartitionTask, flat: Values) -> None:
        """Pass on the flat outputs of a task."""
        outgoing = self._stages[j].outgoing
        if not outgoing:
            self.microbatches[i] = MicroBatch(flat, task.output_structure)
            return
        count = len(flat) - len(outgoing)
        self.microbatches[i] = MicroBatch(flat[:count], task.output_structure)
        self._skips[i].update(zip(outgoing, flat[count:], strict=True))

    def _learns(self, j: int, flat: Values) -> bool:
        """Whether a task on these inputs has any gradient to compute; without one for them the parameters tell."""
        if differentiable(flat):
            return True
        if j not in self._trained:
            self._trained[j] = any(parameter.requires_grad for parameter in self._stages[j].layers.parameters())
        return self._trained[j]

    def _slot(self, j: int, task: PartitionTask, draws: Draws, name: Callable[[str], Task]) -> Slot:
        """What computes a task of partition j without a graph, and again with one."""
        shared, place = self._shared, (self._stages[j].device, self._computing[j])
        return Slot(task.keeping_inputs, shared.ambience, draws, name, *place, shared.observer)

    def _issue(self, i: int, j: int, job: Callable[[], Values]) -> None:
        if self._shared.workers is not None:
            self._shared.workers.submit(self._stages[j].worker, job)
        else:
            self._results[i, j] = result_of(job)
            # A layer that leaves grad mode changed must not change it for what comes next, as in a worker it would not.
            if torch.is_grad_enabled() != self._shared.ambience.grad:
                torch._C._set_grad_enabled(self._shared.ambience.grad)  # noqa: SLF001 - as torch.set_grad_enabled does

    def _result(self, i: int, j: int) -> Values:
        if self._shared.workers is not None:
            flat, error = self._shared.workers.collect(self._stages[j].worker)
        else:
            flat, error = self._results.pop((i, j))
        if error is not None:
            try:
                raise error
            finally:
                # Its traceback holds this frame, which must not hold it: the batch would stay until a collection.
                del error
        values: Values = flat
        return values

    # --- places ----------------------------------------------------------------------------------------------------

    def _moves(self, source: int, target: int) -> bool:
        """Whether tensors are copied between two partitions: not within one device, unless through the host."""
        return self._shared.transfer == "host" or self._stages[source].device != self._stages[target].device

    def _route(self, kind: str, i: int, source: int, target: int) -> Route:
        shared = self._shared
        ends = self._ends[source][i], self._ends[target][i]
        return Route(kind, *ends, i, target, shared.transfer, shared.observer, self._holding)

    def _task(self, i: int, j: int, kind: str) -> Task:
        return name_task(i, j, self._stages[j].device, self._computing[j], kind)


def name_task(i: int, j: int, device: torch.device, stream: Stream, kind: str) -> Task:
    """What an observer is told of a computation."""
    return Task(kind, i, j, device, stream, "compute")
