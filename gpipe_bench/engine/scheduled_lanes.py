"""Lanes of ``backward='scheduled'``: every task has a graph of its own, and its worker runs it backward.

    forward     inlet ── F(i,j) ── outputs  |  inlet ── F(i,j+1) ── ...            | tensors are cut where tasks meet
    backward    worker j, for i = m-1 ... 0:
                R(i,j)   gradients of the outputs   B(i,j)   gradients at the inlet to whoever made its inputs

A task's graph begins at its inlet, which keeps none of its inputs alive (where it is recomputed, at leaves). So no node
stands between the tasks, and the order is that of :func:`gpipe_bench.program.backward_order` whatever the devices:
partitions on the CPU, for which autograd has one thread, run backward at the same time too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.engine.checkpoint import Slot
from gpipe_bench.engine.inlet import Inlet, receive
from gpipe_bench.engine.lanes import BatchLanes, Circumstances, name_task
from gpipe_bench.engine.microbatch import MicroBatch, Values
from gpipe_bench.engine.observer import observed
from gpipe_bench.engine.outlet import Outlet, outlet_of, run_backward_from
from gpipe_bench.engine.phony import new_leaf
from gpipe_bench.engine.randomness import Draws
from gpipe_bench.engine.skip.layout import SkipLayout
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.stage import PartitionTask, Stage, looked_at
from gpipe_bench.engine.streams import use_stream, wait_stream
from gpipe_bench.engine.transfer import move, move_back

__all__ = ["ScheduledLanes"]


@dataclass(slots=True)
class _Cell:
    """A task from its forward to its backward pass.

    Attributes:
        task: computes it.
        inputs: flat, until it has run; those of a checkpoint until it is recomputed, and then the leaves where their
            gradients collect.
        inlet: where they arrive without a checkpoint.
        slot: computes it again, if it is checkpointed.
        outlet: where the gradients of its flat outputs come in.
        grads: gradients of its flat outputs, as they come.
    """

    task: PartitionTask
    inputs: Values
    slot: Slot | None = None
    inlet: Inlet | None = None
    outlet: Outlet = field(default_factory=list)
    grads: list[Tensor | None] = field(default_factory=list)


class ScheduledLanes(BatchLanes):
    """Carries out the steps of :mod:`gpipe_bench.program`, forward and backward.

    Args:
        stages: the partitions.
        layout: the skips between them.
        microbatches: the micro-batches; replaced by what each partition makes of them.
        shared: what all tasks share.

    Attributes:
        input_grads: for each micro-batch the gradients of its values, once the backward pass is over.
    """

    def __init__(
        self, stages: Sequence[Stage], layout: SkipLayout, microbatches: list[MicroBatch], shared: Circumstances
    ) -> None:
        entered = [MicroBatch(_cut(microbatch.values), microbatch.structure) for microbatch in microbatches]
        super().__init__(stages, layout, entered, shared)
        self.input_grads: list[list[Tensor | None]] = [[] for _ in entered]
        self._cells: dict[tuple[int, int], _Cell] = {}
        self._phonies: dict[int, Tensor] = {}
        self._sent: list[SimpleQueue[int]] = [SimpleQueue() for _ in stages]

    # --- forward: fence ------------------------------------------------------------------------------------------

    def join(self, i: int, j: int) -> None:
        """Nothing: the backward pass has its order."""

    def portal(self, i: int, j: int, skip: SkipKey) -> None:
        """See :meth:`gpipe_bench.program.Lanes.portal`."""
        tensor = self._skips[i][skip]
        source = self._layout.routes[skip][0]
        if tensor is not None and self._moves(source, j):
            with torch.no_grad():
                moved = move(self._route("portal", i, source, j), (tensor,))
            (self._skips[i][skip],) = _flagged(moved, (tensor,))

    def copy(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.copy`."""
        if self._moves(j - 1, j):
            riding = self._riding(j)
            flat = self._flat(i, riding)
            with torch.no_grad():
                moved = move(self._route("copy", i, j - 1, j), flat)
            self._put(i, _flagged(moved, flat), riding)

    # --- forward: compute ----------------------------------------------------------------------------------------

    def await_copy(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.await_copy`."""
        end = self._ends[j][i]
        wait_stream(end.computing, end.copying)

    def launch(self, i: int, j: int, *, checkpoint: bool) -> None:
        """See :meth:`gpipe_bench.program.Lanes.launch`."""
        task, inputs = self._enter(i, j)
        draws = self._shared.randomness.draws(i, j)
        cell = self._cells[i, j] = _Cell(task, inputs)
        if checkpoint and self._learns(j, inputs):
            # No reference to these lanes, which keep the cells.
            name = partial(name_task, i, j, self._stages[j].device, self._computing[j])
            cell.slot = self._slot(j, task, draws, name)
        self._issue(i, j, partial(self._forward, i, j, cell, draws))

    def collect(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.collect`."""
        flat = self._result(i, j)
        self._exit(i, j, self._cells[i, j].task, flat)

    def _forward(self, i: int, j: int, cell: _Cell, draws: Draws) -> Values:
        checkpointed = None if cell.slot is None else partial(_without_graph, cell.slot, cell.inputs)
        compute = checkpointed or partial(self._with_graph, j, cell, draws)
        with use_stream(self._computing[j]):
            given = observed(self._shared.observer, self._task, (i, j, "forward"), compute)
        cell.grads = [None] * len(given)
        return given

    def _with_graph(self, j: int, cell: _Cell, draws: Draws) -> Values:
        shared = self._shared
        with shared.ambience.applied():
            inputs, cell.inlet = receive(cell.inputs, self._phony(j))
            cell.inputs = (None,) * len(inputs)
            # Nobody may write to a tensor of the caller's that needs a gradient: autograd forbids it too.
            run = cell.task.keeping_inputs if j == 0 and cell.inlet is not None else cell.task
            with draws.first_pass(again=False):
                outputs = looked_at(self._stages[j], shared.randomness.training, inputs, partial(run, inputs))
        cell.outlet = outlet_of(outputs)
        return _cut(outputs)

    def _phony(self, j: int) -> Tensor:
        """A leaf of partition j for the inlets of its tasks, which share a stream."""
        if j not in self._phonies:
            self._phonies[j] = new_leaf(self._stages[j].device)
        return self._phonies[j]

    # --- forward: leave ------------------------------------------------------------------------------------------

    def await_compute(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.Lanes.await_compute`."""
        end = self._ends[j][i]
        wait_stream(end.copying, end.computing)

    def recompute(self, i: int, j: int) -> None:
        """Nothing: see :meth:`recompute_ahead`."""

    def fork(self, i: int, j: int) -> None:
        """Nothing, as for :meth:`join`."""

    # --- backward ------------------------------------------------------------------------------------------------

    def take_grads(self, i: int, grads: Sequence[Tensor | None]) -> None:
        """Take the gradients of the outputs of micro-batch i."""
        self._give(i, len(self._stages) - 1, grads)

    def _give(self, i: int, j: int, grads: Sequence[Tensor | None], first: int = 0) -> None:
        """Take gradients of the flat outputs of (i, j), from the one with index ``first`` on."""
        self._cells[i, j].grads[first : first + len(grads)] = grads

    def recompute_ahead(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.BackwardLanes.recompute_ahead`."""
        cell = self._cells[i, j]
        if cell.slot is not None:
            with use_stream(self._computing[j]):
                cell.slot.fill(cell.inputs)

    def await_grads(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.BackwardLanes.await_grads`."""
        self._sent[j].get()
        end = self._ends[j][i]
        wait_stream(end.computing, end.copying)

    def backward(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.BackwardLanes.backward`."""
        cell = self._cells[i, j]
        if all(grad is None for grad in cell.grads):
            return
        with use_stream(self._computing[j]):
            if cell.slot is not None:
                if cell.slot.recomputed is None:
                    cell.slot.fill(cell.inputs)
                outputs, cell.inputs = cell.slot.take() or ((), ())
                cell.outlet = outlet_of(outputs, hands_over=False)
                del outputs
            run = run_backward_from if cell.inlet is None else cell.inlet.run_backward
            observed(self._shared.observer, self._task, (i, j, "backward"), run, cell.outlet, cell.grads)

    def send_grads(self, i: int, j: int) -> None:
        """See :meth:`gpipe_bench.program.BackwardLanes.send_grads`."""
        cell = self._cells.pop((i, j))
        if cell.inlet is not None:
            grads = cell.inlet.grads()
        else:
            grads = [leaf.grad if isinstance(leaf, Tensor) else None for leaf in cell.inputs]
        del cell
        if j == 0:
            self.input_grads[i] = grads
            return
        end = self._ends[j][i]
        wait_stream(end.copying, end.computing)
        incoming = self._stages[j].incoming if self._shared.components.portals else []
        count = len(grads) - len(incoming)
        self._give(i, j - 1, self._returned("copy", i, j - 1, j, grads[:count]))
        for skip, grad in zip(incoming, grads[count:], strict=True):
            source = self._layout.routes[skip][0]
            place = len(self._cells[i, source].grads) - len(self._stages[source].outgoing)
            place += self._stages[source].outgoing.index(skip)
            self._give(i, source, self._returned("portal", i, source, j, [grad]), place)
        self.release(j - 1)

    def release(self, j: int) -> None:
        """Let partition j go on: all gradients that it waits for have been sent, or will never come."""
        self._sent[j].put(0)

    def _returned(self, kind: str, i: int, source: int, target: int, grads: Sequence[Tensor | None]) -> Sequence[Any]:
        if not self._moves(source, target) or all(grad is None for grad in grads):
            return grads
        return move_back(self._route(kind, i, source, target), grads)


def _without_graph(slot: Slot, inputs: Values) -> Values:
    """The outputs of a checkpointed task; they count as differentiable, as torch.utils.checkpoint has it."""
    outputs = slot.first_pass(inputs)
    return tuple([value.detach().requires_grad_() if _carries(value) else value for value in outputs])


def _cut(values: Sequence[Any]) -> Values:
    """``values`` as leaves, each of which requires a gradient if the value does."""
    return tuple(
        [value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value for value in values]
    )


def _flagged(moved: Sequence[Any], values: Sequence[Any]) -> Values:
    """``moved``, tensors of which require a gradient as their originals do."""
    for there, here in zip(moved, values, strict=True):
        if isinstance(here, Tensor):
            there.requires_grad_(here.requires_grad)
    return tuple(moved)


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
