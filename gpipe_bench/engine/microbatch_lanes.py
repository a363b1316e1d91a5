"""Lanes of ``backward='scheduled'`` for one thread on the CPU: a micro-batch has a graph through several partitions.

    forward     F(i,0) ── ... ── F(i,k-1)  |  inlet ── F(i,k) ── ... ── F(i,n-1)   | cut where spans of partitions meet
    backward    for i = m-1 ... 0:  B(i,n-1) ... B(i,k)                             | one call of autograd for each i
                for i = m-1 ... 0:  B(i,k-1) ... B(i,0)

A graph for every task, as workers need it (:mod:`gpipe_bench.engine.scheduled_lanes`), costs a node and a call of
autograd each. Here autograd goes through the partitions of a span by itself, and spans are as long as memory allows
(:mod:`gpipe_bench.engine.spans`). Each partition still takes its micro-batches from the last to the first, one
by one, so gradients are added up in the same order, to the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from gpipe_bench.engine.inlet import Inlet, receive
from gpipe_bench.engine.lanes import BatchLanes, Circumstances
from gpipe_bench.engine.microbatch import MicroBatch, Values
from gpipe_bench.engine.outlet import Outlet, outlet_of, run_backward_from
from gpipe_bench.engine.phony import new_leaf
from gpipe_bench.engine.randomness import Draws
from gpipe_bench.engine.skip.layout import SkipLayout
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.spans import spans_of
from gpipe_bench.engine.stage import PartitionTask, Stage
from gpipe_bench.program import Plan

__all__ = ["MicroBatchLanes", "graph_starts"]


def graph_starts(
    plan: Plan[SkipKey], stages: Sequence[Stage], layout: SkipLayout, transfer: str, training: bool
) -> tuple[int, ...] | None:
    """Where the graphs of a micro-batch begin, if so few do what a graph for each task would do.

    Args:
        plan: of the batch.
        stages: the partitions.
        layout: the skips between them.
        transfer: ``direct`` or ``host``.
        training: training mode of the pipeline.

    Returns:
        The first partition of each span, see :func:`gpipe_bench.engine.spans.spans_of`; None where each task needs a
        graph of its own.
    """
    if plan.checkpoints(0) or transfer != "direct":
        return None
    if not all(stage.device.type == "cpu" and stage.whole.get(training) is True for stage in stages):
        return None
    sizes = tuple(stage.sizes[training] for stage in stages)
    # Skips need no way from one graph to another if they stay within one.
    cuts = tuple(not layout.passing(stage.j - 1) for stage in stages)
    return spans_of(sizes, cuts, plan.m, clock_cycle=plan.components.clock_cycle)


class MicroBatchLanes(BatchLanes):
    """Carries out the forward steps of :mod:`gpipe_bench.program` where nothing moves, and the backward pass.

    Args:
        stages: the partitions, all on the CPU; see :attr:`gpipe_bench.engine.stage.Stage.whole`.
        layout: the skips between them.
        microbatches: the micro-batches; replaced by what each partition makes of them.
        shared: what all tasks share.
        starts: first partitions of the spans that have a graph.

    Attributes:
        input_grads: for each micro-batch the gradients of its values, once the backward pass is over.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        layout: SkipLayout,
        microbatches: list[MicroBatch],
        shared: Circumstances,
        starts: Sequence[int],
    ) -> None:
        super().__init__(stages, layout, [*microbatches], shared)
        self.input_grads: list[list[Tensor | None]] = [[None] * len(microbatch.values) for microbatch in microbatches]
        self._phony = new_leaf(stages[0].device)
        # By the partition that begins a span, and by that after its last one.
        self._inlets: dict[int, list[Inlet | None]] = {start: [] for start in starts}
        self._outlets: dict[int, list[Outlet]] = {end: [] for end in (*starts[1:], len(stages))}
        self._grads: list[Sequence[Tensor | None]] = [() for _ in microbatches]
        self._launched: dict[tuple[int, int], PartitionTask] = {}
        for i in range(len(microbatches)):
            self._begin(i, 0)

    def _begin(self, i: int, j: int) -> None:
        """Begin a graph of micro-batch i, which is about to enter partition j."""
        values, inlet = receive(self.microbatches[i].values, self._phony)
        self.microbatches[i] = MicroBatch(values, self.microbatches[i].structure)
        self._inlets[j].append(inlet)

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
        self._issue(i, j, partial(self._forward, i, j, task, inputs, self._shared.randomness.draws(i, j)))

    def collect(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.collect`."""
        task = self._launched.pop((i, j))
        flat = self._result(i, j)
        self._exit(i, j, task, flat)
        if j + 1 in self._outlets:
            self._outlets[j + 1].append(outlet_of(flat))
        if j + 1 in self._inlets:
            self._begin(i, j + 1)

    def await_compute(self, i: int, j: int) -> None:
        """Nothing, as for :meth:`copy`."""

    def recompute(self, i: int, j: int) -> None:
        """Nothing: there are no checkpoints."""

    def fork(self, i: int, j: int) -> None:
        """Nothing, as for :meth:`join`."""

    def _forward(self, i: int, j: int, task: PartitionTask, inputs: Values, draws: Draws) -> Values:
        # Nobody may write to a tensor of the caller's that needs a gradient: autograd forbids it too.
        run = task.keeping_inputs if j == 0 and self._inlets[0][i] is not None else task
        with self._shared.ambience.applied(), draws.first_pass(again=False):
            return run(inputs)

    # --- backward ------------------------------------------------------------------------------------------------

    def take_grads(self, i: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of the outputs of micro-batch i."""
        self._grads[i] = grads

    def run(self) -> None:
        """Run all micro-batches backward, from span to span.

        Raises:
            Exception: the first that a task raised.
        """
        for start, end in reversed([*zip(self._inlets, self._outlets, strict=True)]):
            inlets, outlets = self._inlets[start], self._outlets[end]
            for i in reversed(range(len(self._grads))):
                inlet, outlet, grads = inlets.pop(), outlets.pop(), [*self._grads[i]]
                self._grads[i] = ()
                run = run_backward_from if inlet is None else inlet.run_backward
                if any(grad is not None for grad in grads):
                    run(outlet, grads)
                if inlet is not None:
                    self._grads[i] = inlet.grads()
        for i, left in enumerate(self._grads):
            if left:
                self.input_grads[i] = [*left]
