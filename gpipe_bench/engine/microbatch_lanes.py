"""Lanes of ``backward='scheduled'`` for one thread on the CPU: every micro-batch has a graph through all partitions.

    forward     F(i,0) ── F(i,1) ── ... ── F(i,n-1)       | nothing is cut, since no partition runs beside another
    backward    for i = m-1 ... 0:  B(i,n-1) ... B(i,0)   | one call of autograd for a micro-batch

A graph for every task, as workers need it (:mod:`gpipe_bench.engine.scheduled_lanes`), costs a node and a call of
autograd each. Here autograd goes through the partitions by itself. Each partition still takes its micro-batches from
the last to the first, one by one, so gradients are added up in the same order, to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from torch import Tensor

from gpipe_bench.engine.autograd import run_backward
from gpipe_bench.engine.inlet import Edges, Inlet, edges_of, receive
from gpipe_bench.engine.lanes import BatchLanes, Circumstances
from gpipe_bench.engine.microbatch import MicroBatch, Values
from gpipe_bench.engine.phony import new_leaf
from gpipe_bench.engine.randomness import Draws
from gpipe_bench.engine.skip.layout import SkipLayout
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.stage import PartitionTask, Stage
from gpipe_bench.program import Plan

__all__ = ["MOST_BYTES", "MicroBatchLanes", "one_graph"]

MOST_BYTES: Final = 2**20
"""Of the parameters. After one micro-batch all partitions have gradients, sooner than in the order of the clock-cycles,
and that is what more can be alive at a time."""


def one_graph(plan: Plan[SkipKey], stages: Sequence[Stage], transfer: str, training: bool) -> bool:
    """Whether one graph through all partitions does for each micro-batch what a graph for each task would do.

    Args:
        plan: of the batch.
        stages: the partitions.
        transfer: ``direct`` or ``host``.
        training: training mode of the pipeline.
    """
    if plan.checkpoints(0) or transfer != "direct" or sum(stage.weight_bytes for stage in stages) > MOST_BYTES:
        return False
    return all(stage.device.type == "cpu" and stage.whole.get(training) is True for stage in stages)


class MicroBatchLanes(BatchLanes):
    """Carries out the forward steps of :mod:`gpipe_bench.program` where nothing moves, and the backward pass.

    Args:
        stages: the partitions, all on the CPU; see :attr:`gpipe_bench.engine.stage.Stage.whole`.
        layout: the skips between them.
        microbatches: the micro-batches; replaced by what each partition makes of them.
        shared: what all tasks share.

    Attributes:
        input_grads: for each micro-batch the gradients of its values, once the backward pass is over.
    """

    def __init__(
        self, stages: Sequence[Stage], layout: SkipLayout, microbatches: list[MicroBatch], shared: Circumstances
    ) -> None:
        phony = new_leaf(stages[0].device)
        received = [receive(microbatch.values, phony) for microbatch in microbatches]
        pairs = zip(received, microbatches, strict=True)
        entered = [MicroBatch(values, microbatch.structure) for (values, _), microbatch in pairs]
        super().__init__(stages, layout, entered, shared)
        self.input_grads: list[list[Tensor | None]] = [[None] * len(microbatch.values) for microbatch in microbatches]
        self._inlets: list[Inlet | None] = [inlet for _, inlet in received]
        self._edges: list[Edges] = [[] for _ in microbatches]
        self._grads: list[Sequence[Tensor | None]] = [() for _ in microbatches]
        self._launched: dict[tuple[int, int], PartitionTask] = {}

    # --- forward -------------------------------------------------------------------------------------------------

    def join(self, i: int, j: int) -> None:
        """Nothing: the backward pass has its order."""

    def portal(self, i: int, j: int, skip: SkipKey) -> None:
        """Nothing: the skip is there."""

    def copy(self, i: int, j: int) -> None:
        """Nothing: the micro-batch is there."""

    def await_copy(self, i: int, j: int) -> None:
        """Nothing, as for :meth:`copy`."""

    def launch(self, i: int, j: int, *, checkpoint: bool) -> None:  # noqa: ARG002 - there are none
        """See :meth:`gpipe_bench.program.Lanes.launch`."""
        task, inputs = self._enter(i, j)
        self._launched[i, j] = task
        self._issue(i, j, partial(self._forward, j, task, inputs, self._shared.randomness.draws(i, j)))

    def collect(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.collect`."""
        task = self._launched.pop((i, j))
        flat = self._result(i, j)
        self._exit(i, j, task, flat)
        if j == len(self._stages) - 1:
            self._edges[i] = edges_of(flat)

    def await_compute(self, i: int, j: int) -> None:
        """Nothing, as for :meth:`copy`."""

    def recompute(self, i: int, j: int) -> None:
        """Nothing: there are no checkpoints."""

    def fork(self, i: int, j: int) -> None:
        """Nothing, as for :meth:`join`."""

    def _forward(self, j: int, task: PartitionTask, inputs: Values, draws: Draws) -> Values:
        # Nobody may write to a tensor of the caller's that needs a gradient: autograd forbids it too.
        run = task.keeping_inputs if j == 0 and self._inlets[0] is not None else task
        with self._shared.ambience.applied(), draws.first_pass(again=False):
            return run(inputs)

    # --- backward ------------------------------------------------------------------------------------------------

    def take_grads(self, i: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of the outputs of micro-batch i."""
        self._grads[i] = grads

    def run(self) -> None:
        """Run all micro-batches backward.

        Raises:
            Exception: the first that a task raised.
        """
        for i in reversed(range(len(self._edges))):
            edges, self._edges[i] = self._edges[i], []
            grads, self._grads[i] = self._grads[i], ()
            inlet = self._inlets[i]
            run = run_backward if inlet is None else inlet.run_backward
            run(edges, grads)
            if inlet is not None:
                self.input_grads[i] = inlet.grads()
