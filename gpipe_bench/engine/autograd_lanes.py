"""Lanes of ``backward='autograd'``: one graph through all partitions, which autograd runs backward in its own order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from gpipe_bench.engine.ahead import Ahead
from gpipe_bench.engine.autograd import Made, Numbers, can_renumber, rank_of_place, set_rank, skip_ranks
from gpipe_bench.engine.checkpoint import Slot, checkpoint, fill, recompute
from gpipe_bench.engine.dependency import fork, join
from gpipe_bench.engine.lanes import BatchLanes, Circumstances, name_task
from gpipe_bench.engine.marks import is_mark, run_marked
from gpipe_bench.engine.microbatch import MicroBatch, Values, differentiable
from gpipe_bench.engine.observer import observed
from gpipe_bench.engine.phony import new_leaf
from gpipe_bench.engine.randomness import Draws
from gpipe_bench.engine.skip.layout import SkipLayout
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.stage import PartitionTask, Stage, with_known_end
from gpipe_bench.engine.streams import Stream, use_stream
from gpipe_bench.engine.transfer import copy, wait

__all__ = ["AutogradLanes"]


@dataclass(slots=True)
class _Running:
    """A task between launch and leave."""

    task: PartitionTask
    inputs: Values
    slot: Slot | None


class AutogradLanes(BatchLanes):
    """Carries out the steps of :mod:`gpipe_bench.program` with nodes of the autograd graph between the tasks.

    Those of Fork and Join are left out where the sequence numbers of the tasks' nodes give the same order.

    Args:
        stages: the partitions.
        layout: the skips between them.
        microbatches: the micro-batches; replaced by what each partition makes of them.
        shared: what all tasks share.
    """

    def __init__(
        self, stages: Sequence[Stage], layout: SkipLayout, microbatches: list[MicroBatch], shared: Circumstances
    ) -> None:
        super().__init__(stages, layout, microbatches, shared)
        # phonies: of open lanes by (i, j), and of the lane that micro-batch i is about to be tied to
        self._lanes: dict[tuple[int, int], Tensor | None] = {}
        self._entering: list[Tensor | None] = [None] * len(microbatches)
        self._running: dict[tuple[int, int], _Running] = {}
        self._collected = 0
        tasks = len(microbatches) * len(stages)
        ranked = shared.ranked and can_renumber()
        self._by_place = ranked and all(stage.device.type == "cpu" for stage in stages)
        inline = shared.workers is None and not self._by_place
        self._numbers = Numbers(tasks) if ranked and inline else None
        self._checkpointed = False
        alone = not shared.randomness.nested and self._on_one_cpu()
        self._spares = alone and shared.components.fork_join and can_renumber()
        # checkpoints need neither lanes nor nodes that recompute, see gpipe_bench.engine.ahead
        self._bare = self._spares and shared.checkpointed > 0 and (shared.ranked or len(stages) == 1)
        self._edge = new_leaf(stages[0].device) if self._bare else None
        self._ahead = None
        # of one partition each checkpoint comes right after its own recomputation, and may do it itself
        if self._bare and shared.components.early_recompute and len(stages) > 1:
            self._ahead = Ahead(len(microbatches) - 1, [self._sources(j) for j in range(len(stages))], fill)
        # partitions that need no lanes, see _look
        self._ordered: set[int] = set()
        # those whose last checkpoint needs none before a task without
        self._ending = with_known_end(stages)

    # --- fence ---------------------------------------------------------------------------------------------------

    def join(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.join`; the next node of micro-batch i takes the phony."""
        self._entering[i] = self._lanes.pop((i - 1, j), None)

    def portal(self, i: int, j: int, skip: SkipKey) -> None:
        """See :meth:`gpipe_bench.program.Lanes.portal`."""
        tensor = self._skips[i][skip]
        source = self._layout.routes[skip][0]
        if tensor is not None and self._moves(source, j):
            (self._skips[i][skip],) = copy(self._route("portal", i, source, j), (tensor,))

    def copy(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.copy`."""
        if self._moves(j - 1, j):
            riding = self._riding(j)
            flat = self._flat(i, riding)
            phony = None
            if differentiable(flat):  # else no gradient copy will end the lane: it goes on to the task
                phony, self._entering[i] = self._entering[i], None
            self._put(i, copy(self._route("copy", i, j - 1, j), flat, phony), riding)

    # --- compute -------------------------------------------------------------------------------------------------

    def await_copy(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.await_copy`."""
        end, stage = self._ends[j][i], self._stages[j]
        if end.copying == end.computing:
            return
        self._put(i, wait(end.computing, end.copying, self._flat(i, stage.incoming), end.copying), stage.incoming)

    def launch(self, i: int, j: int, *, checkpoint: bool) -> None:
        """See :meth:`gpipe_bench.program.Lanes.launch`."""
        stage = self._stages[j]
        task, flat = self._enter(i, j)
        draws = self._shared.randomness.draws(i, j)
        phony, self._entering[i] = self._entering[i], None
        if checkpoint and self._learns(j, flat):
            # Nothing that the graph keeps may know the lanes, which keep the graph: Python does not see through it.
            name = partial(name_task, i, j, stage.device, self._computing[j])
            slot = self._slot(j, task, draws, name)
            laned = self._laned(i, j)
            if self._ahead is not None:
                slot.early = self._ahead.early(i, j, node=laned)
            self._running[i, j] = _Running(task, flat if laned else (), slot)
            self._checkpointed = True
            phony = phony if phony is not None else self._edge
            job = partial(self._run_checkpointed, i, j, slot, flat, phony)
            if self._numbers is not None:
                job = partial(self._numbers.count, stage.worker, job)
        else:
            if phony is not None:
                flat = self._tied(i, j, flat, phony)
            self._running[i, j] = _Running(task, (), None)
            job = partial(self._run_plain, i, j, task, flat, draws)
            spares = self._spares and not self._checkpointed
            unseen = stage.strays is None and phony is not None and can_renumber()
            if self._by_place or self._numbers is not None or self._bare or unseen or (spares and i == 0):
                job = partial(self._look, (i, j), spares, flat, phony, job)
        self._issue(i, j, job)

    def collect(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.collect`."""
        running = self._running[i, j]
        flat = self._result(i, j)
        self._exit(i, j, running.task, flat)
        if running.slot is None:
            if self._ahead is not None:
                self._ahead.precede(i, j, flat)
        elif self._by_place:
            set_rank(flat, rank_of_place(i, j, len(self._stages)))
        elif self._shared.ranked:
            set_rank(flat, self._collected)
        if running.slot is None or not self._laned(i, j):
            del self._running[i, j]
        self._collected += 1

    # --- leave ---------------------------------------------------------------------------------------------------

    def await_compute(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.await_compute`."""
        end, stage = self._ends[j][i], self._stages[j]
        if end.copying == end.computing:
            return
        self._put(i, wait(end.copying, end.computing, self._flat(i, stage.outgoing), end.copying), stage.outgoing)

    def recompute(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.recompute`; the node is the Fork that would follow, too."""
        running = self._running.pop((i, j), None)
        if running is not None and running.slot is not None:
            stage = self._stages[j]
            flat = self._flat(i, stage.outgoing)
            fork = self._shared.components.fork_join and i < len(self.microbatches) - 1
            flat, phony = recompute(running.slot, running.inputs, flat, self._leaving(i, j), fork=fork)
            self._put(i, flat, stage.outgoing)
            if fork:
                self._lanes[i, j] = phony

    def fork(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.fork`."""
        stage = self._stages[j]
        if j in self._ordered or (i, j) in self._lanes or not self._laned(i, j):
            return
        with use_stream(self._leaving(i, j)):
            flat, self._lanes[i, j] = fork(self._flat(i, stage.outgoing))
        self._put(i, flat, stage.outgoing)

    # --- helpers -------------------------------------------------------------------------------------------------

    def _tied(self, i: int, j: int, flat: Values, phony: Tensor) -> Values:
        """Tie the inputs of a task without checkpoint to its lane, or give the task's nodes the order of one.

        Inputs that need no gradient, as a batch and tokens, would be made to need one for a lane, which would be
        computed in vain. The numbers of the task's nodes do without: they outrank tasks without checkpoint that were
        made earlier, and the recomputation that the lane leads to is put below them. Nodes that have no such numbers
        need the lane.
        """
        stage, count, n = self._stages[j], len(self.microbatches[i].values), len(self._stages)
        if differentiable(flat[:count]) or stage.nests or stage.strays or not can_renumber():
            with use_stream(self._computing[j]):
                flat = (*join(flat[:count], phony), *flat[count:])
        if differentiable(flat[:count]):
            return flat
        if self._shared.ranked and i == self._shared.checkpointed:
            below = rank_of_place(i, j, n) if self._by_place else len(self.microbatches) * n
            set_rank((phony,), below - 1)
        return flat

    def _leaving(self, i: int, j: int) -> Stream:
        """The stream on which gradients of (i, j) arrive."""
        end = self._ends[j][i]
        return end.copying if j < len(self._stages) - 1 else end.computing

    def _laned(self, i: int, j: int) -> bool:
        """Whether the checkpoint (i, j) has a lane: on one CPU only before a task without, whose end is not known."""
        last = i == self._shared.checkpointed - 1 < len(self.microbatches) - 1
        return not self._bare or (last and j not in self._ending)

    def _sources(self, j: int) -> list[int]:
        """The partitions whose outputs partition j takes."""
        skips = self._stages[j].incoming if self._shared.components.portals else []
        return sorted({*range(max(j - 1, 0), j), *(self._layout.routes[skip][0] for skip in skips)})

    def _on_one_cpu(self) -> bool:
        """Whether autograd has one thread for all partitions, with no nodes between them nor of pipelines in layers."""
        places = [(stage.device.type, stage.nests) for stage in self._stages]
        return set(places) == {("cpu", False)} and self._shared.transfer == "direct"

    def _look(
        self, place: tuple[int, int], spares: bool, flat: Values, phony: Tensor | None, job: Callable[[], Values]
    ) -> Values:
        """Run a task, number its nodes, and see whether its partition needs lanes, if the others spare them.

        With one thread for all partitions, autograd takes the highest number among the nodes that are ready. Numbers
        that grow with the micro-batch then give every partition the order that Fork and Join give it, as long as its
        tasks become ready at one place each and all their nodes lie behind that place.
        """
        i, j = place
        made = Made((*flat, phony), job)
        stage = self._stages[j]
        stage.strays = bool(stage.strays) or made.strays
        single = made.alone and len(differentiable(made.outputs)) == 1
        if self._bare:
            stage.chained = single and not all(is_mark(node) for node, _ in made.nodes)
            stage.reaches = made.reaches(flat)
        if not (spares and single):
            self._ordered.discard(j)
        elif i == 0:
            self._ordered.add(j)
        # Where nothing is ranked, the calling thread has numbered them so by itself.
        if self._by_place:
            made.number_from(rank_of_place(i, j, len(self._stages)))
        elif self._numbers is not None:
            self._numbers.renumber(self._stages[j].worker, made)
        return made.outputs

    def _run_checkpointed(self, i: int, j: int, slot: Slot, flat: Values, phony: Tensor | None) -> Values:
        with use_stream(self._computing[j]):
            return observed(self._shared.observer, self._task, (i, j, "forward"), checkpoint, slot, flat, phony)

    def _run_plain(self, i: int, j: int, task: PartitionTask, flat: Values, draws: Draws) -> Values:
        shared = self._shared
        if self._checkpointed and self._numbers is not None:
            self._numbers.skip(self._stages[j].worker)
        elif self._checkpointed and shared.workers is not None and not self._by_place:
            skip_ranks(len(self.microbatches) * len(self._stages))
        with use_stream(self._computing[j]), shared.ambience.applied(), draws.first_pass(again=False):
            if shared.observer is None:
                return task(flat)
            run = partial(observed, shared.observer, self._task, (i, j, "forward"), task)
            return run_marked(shared.observer, self._task(i, j, "backward"), run, flat)
