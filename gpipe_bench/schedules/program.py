"""The paper's forward program. The engine runs it on tensors; the simulator runs it to write a trace.

On torch lanes a step is tensors, streams, workers and autograd functions; on the simulator's lanes it is rows of a host
thread and a node of a graph. Both run this program, so a component that is off is off in both by the same line.

One clock-cycle (torchgpipe, arXiv 2004.09910, sections 3.1-3.3), for its tasks (i, j):

    fence    join(i, j)           after B(i, j), B(i-1, j) may start     if i > 0         fork_join
             portal(i, j, s)      skip s hops to its destination j                        portals
             copy(i, j)           micro-batch i: device j-1 -> j         if j > 0
    compute  await_copy(i, j)     compute stream waits for the copy      if j > 0
             launch(i, j)         hand the task to the worker of partition j
    leave    collect(i, j)        take its result; an exception surfaces here
             await_compute(i, j)  copy stream waits for the computation  if j < n - 1
             recompute(i, j)      side lane that recomputes (i, j)       if checkpointed  early_recompute
             fork(i, j)           the other end of join(i + 1, j)        if i < m - 1     fork_join

All tasks of a cycle are fenced before the first is launched, and all are launched before the first is collected.

The backward pass is autograd's, in the order that join, recompute and fork leave it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol, TypeVar

from gpipe_bench.components import Components
from gpipe_bench.schedules.cycles import Cycle, checkpoint_stop, clock_cycles, microbatch_major

SkipT = TypeVar("SkipT", bound=Hashable)
SkipT_contra = TypeVar("SkipT_contra", bound=Hashable, contravariant=True)


class Lanes(Protocol[SkipT_contra]):
    """What the forward program needs of an execution: one method per step, called from one host thread."""

    def join(self, i: int, j: int) -> None:
        """Tie micro-batch i, about to enter partition j, to the lane that ``fork(i - 1, j)`` opened."""

    def portal(self, i: int, j: int, skip: SkipT_contra) -> None:
        """Move a skip tensor of micro-batch i from its source device to that of partition j."""

    def copy(self, i: int, j: int) -> None:
        """Move micro-batch i from the device of partition j-1 to that of j."""

    def await_copy(self, i: int, j: int) -> None:
        """Make the compute stream of partition j wait for the copy of micro-batch i."""

    def launch(self, i: int, j: int, *, checkpoint: bool) -> None:
        """Start the computation of (i, j) without waiting for it."""

    def collect(self, i: int, j: int) -> None:
        """Take the result of (i, j); raises what the computation raised."""

    def await_compute(self, i: int, j: int) -> None:
        """Make the copy stream of micro-batch i on partition j wait for its computation."""

    def recompute(self, i: int, j: int) -> None:
        """Open the side lane that recomputes (i, j) in the backward pass ahead of its gradient."""

    def fork(self, i: int, j: int) -> None:
        """Open the lane that holds B(i, j) back until ``join(i + 1, j)`` has run backward."""

    def drain(self) -> None:
        """After an exception, wait until every launched task has ended; nobody will take their results."""


@dataclass(frozen=True)
class Plan(Generic[SkipT]):
    """Everything that decides the order of a forward pass.

    Attributes:
        m: actual micro-batches.
        n: partitions.
        components: which components are on.
        checkpoint: ``always``, ``except_last`` or ``never``; what counts is the number of actual micro-batches.
        arrivals: for each partition, the skips that a portal brings there, in layout order.
        backward: whether a backward pass can follow; without one no lane is opened.
    """

    m: int
    n: int
    components: Components = field(default_factory=Components)
    checkpoint: str = "except_last"
    arrivals: Mapping[int, Sequence[SkipT]] = field(default_factory=dict)
    backward: bool = True

    def cycles(self) -> Iterable[Cycle]:
        """The cycles of this plan: clock-cycles, or one task at a time without them."""
        order = clock_cycles if self.components.clock_cycle else microbatch_major
        return order(self.m, self.n)

    def checkpoints(self, i: int) -> bool:
        """Whether micro-batch i is checkpointed."""
        return i < self.checkpointed

    @property
    def checkpointed(self) -> int:
        """How many micro-batches are checkpointed: the first ones."""
        return checkpoint_stop(self.checkpoint, self.m) if self.backward else 0


def run_forward(plan: Plan[SkipT], lanes: Lanes[SkipT]) -> None:
    """Run the forward program of ``plan`` on ``lanes``.

    Raises:
        Exception: the first exception of a cycle, after all tasks of that cycle have ended; later cycles do not run.
    """
    try:
        for cycle in plan.cycles():
            for phase in PHASES:
                for i, j in cycle:
                    phase(plan, lanes, i, j)
    except BaseException:
        lanes.drain()
        raise


def _fence(plan: Plan[SkipT], lanes: Lanes[SkipT], i: int, j: int) -> None:
    if i > 0 and plan.backward and plan.components.fork_join:
        lanes.join(i, j)
    if plan.components.portals:
        for skip in plan.arrivals.get(j, ()):
            lanes.portal(i, j, skip)
    if j > 0:
        lanes.copy(i, j)


def _launch(plan: Plan[SkipT], lanes: Lanes[SkipT], i: int, j: int) -> None:
    if j > 0:
        lanes.await_copy(i, j)
    lanes.launch(i, j, checkpoint=plan.checkpoints(i))


def _collect(plan: Plan[SkipT], lanes: Lanes[SkipT], i: int, j: int) -> None:
    lanes.collect(i, j)
    if j < plan.n - 1:
        lanes.await_compute(i, j)
    if plan.checkpoints(i) and plan.components.early_recompute:
        lanes.recompute(i, j)
    if i < plan.m - 1 and plan.backward and plan.components.fork_join:
        lanes.fork(i, j)


PHASES: Final = (_fence, _launch, _collect)
"""The phases of a cycle, each for all of its tasks before the next: functions of (plan, lanes, i, j)."""
