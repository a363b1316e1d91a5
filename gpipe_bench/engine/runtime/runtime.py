"""The interpreter: carries out lists of actions, each list in a thread, or all of them in one.

A thread takes what an action needs from mailboxes, computes, and puts the results into the mailboxes of the partitions
that need them. Skips and their gradients go straight from one partition that has them to another, as
:mod:`gpipe_bench.schedules.messages` says. Since :func:`gpipe_bench.schedules.check` has found one order of all
actions, no thread waits for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from gpipe_bench.autograd.microbatch import MicroBatch, differentiable
from gpipe_bench.engine.computation import Computation
from gpipe_bench.engine.pipeline import BatchContext
from gpipe_bench.engine.runtime.cell import Cell
from gpipe_bench.engine.runtime.lists import ActionLists
from gpipe_bench.engine.runtime.mailboxes import Mailboxes, Stopped
from gpipe_bench.engine.transfer import Holding, move, move_back, wait_stream
from gpipe_bench.engine.worker import in_fresh_thread, is_foreign_thread, new_thread, raised
from gpipe_bench.schedules import Action


class End(Protocol):
    """What follows the last partition: the caller's loss, or one per micro-batch."""

    def take(self, i: int, microbatch: MicroBatch) -> None:
        """Take the outputs of micro-batch i."""

    def grads(self, i: int) -> list[Tensor | None]:
        """Give the gradients of these outputs."""


class Runtime:
    """One batch.

    Args:
        microbatches: the batch, if its first partition is here.
        batch: what all tasks share.
        lists: what each thread does.
        end: what follows the last partition, if that is here.
        learning: whether backward passes follow.
        mailboxes: how values travel.

    Attributes:
        input_grads: for each micro-batch the gradients of its values, once the backward pass is over.
    """

    def __init__(
        self,
        microbatches: list[MicroBatch],
        batch: BatchContext,
        lists: ActionLists,
        end: End,
        *,
        learning: bool,
        mailboxes: Mailboxes,
    ) -> None:
        m, partitions = lists.facts.microbatches, batch.partitions
        self.input_grads: list[list[Tensor | None]] = [[] for _ in range(m)]
        self._partitions, self._batch, self.lists, self._end = partitions, batch, lists, end
        # Whether each list has a thread.
        self._learning, self._threads = learning, batch.threads and len(set(lists.groups)) > 1
        self._holding = Holding()
        self._streams = batch.streams
        self._cells: dict[tuple[int, int], Cell] = {}
        self._mailboxes = mailboxes
        for i, microbatch in enumerate(microbatches):
            self._mailboxes.put(("F", i, 0, None), microbatch)
        self._failures: dict[int, BaseException] = {}

    def run(self, order: Sequence[Action]) -> None:
        """Carry out the actions of ``order``, which is a part of the schedule's.

        Raises what the first action of the order that failed has raised. Later ones have not run, or may have.
        """
        try:
            # A thread of autograd's own, in a backward pass within a backward pass, is itself needed to run cells.
            if self._threads and not is_foreign_thread():
                in_fresh_thread(partial(self._spread, self.lists.per_thread(order)), self._mailboxes.stop)
            else:
                self._perform(order)
            if self._failures:
                # No variable may hold what is raised: its traceback holds this frame.
                first = [(None, self._failures[min(self._failures)])]
                self._failures.clear()
                raised(first.pop())
        except BaseException:
            self._cells.clear()
            self._mailboxes.clear()
            raise
        finally:
            self._holding.clear()

    def _spread(self, lists: Sequence[Sequence[Action]]) -> None:
        """Carry out the first list here, and each other in a thread."""
        threads = [
            new_thread(f"gpipe-worker-{number}", partial(self._perform, actions))
            for number, actions in enumerate(lists[1:], 1)
        ]
        for thread in threads:
            thread.start()
        self._perform(lists[0])
        for thread in threads:
            thread.join()

    def _perform(self, actions: Sequence[Action]) -> None:
        do = {"F": self._forward, "R": self._within, "B": self._backward, "I": self._backward, "W": self._within}
        for action in actions:
            position = self.lists.positions[action]
            if position >= self._mailboxes.limit:
                return
            try:
                do[action.kind](action, position)
                self._mailboxes.done(action)
            except Stopped:
                return
            except BaseException as error:  # noqa: BLE001 - it belongs to the thread that called the pipeline
                self._failures[position] = error
                self._mailboxes.fail(action, position, error)
                return

    # --- actions ---------------------------------------------------------------------------------------------------

    def _forward(self, action: Action, position: int) -> None:
        _, i, j = action
        partition = self._partitions[j]
        microbatch: MicroBatch = self._mailboxes.take(("F", i, j, None), position)
        skips = [self._mailboxes.take(("F", i, j, key), position) for key in partition.skips.incoming]
        end, count = self._streams[j][i], len(microbatch.values)
        wait_stream(end.computing, end.copying)
        shared = {count + index for index, (_, aliased) in enumerate(skips) if aliased}
        flat = (*microbatch.values, *[value for value, _ in skips])
        task = Computation(self._batch, partition, i, microbatch, microbatch.aliased | shared)
        del microbatch, skips
        if self._learning:
            learns = self._batch.trained[j] or bool(differentiable(flat))
            checkpointed = learns and (i, j) in self.lists.checkpointed
            cell = self._cells[i, j] = Cell(task, checkpointed=checkpointed, splits=self.lists.splits)
            flat = cell.forward(flat)
        else:
            flat = task.forward(flat)
        wait_stream(end.copying, end.computing)
        self._send(i, j, flat, task)

    def _backward(self, action: Action, position: int) -> None:
        kind, i, j = action
        last = j == len(self._partitions) - 1
        grads: list[Tensor | None] = self._end.grads(i) if last else self._mailboxes.take(("B", i, j, None), position)
        grads = [
            *grads,
            *[self._mailboxes.take(("B", i, j, key), position) for key in self._partitions[j].skips.outgoing],
        ]
        end = self._streams[j][i]
        wait_stream(end.computing, end.copying)
        whole = kind == "B"
        found = self._cells.pop((i, j)).backward(grads) if whole else self._cells[i, j].backward_inputs(grads)
        wait_stream(end.copying, end.computing)
        self._send_back(i, j, found)

    def _within(self, action: Action, _: int) -> None:
        """R or W, which nothing arrives for or leaves."""
        kind, i, j = action
        if kind == "R":
            self._cells[i, j].recompute()
        else:
            self._cells.pop((i, j)).backward_weights()

    # --- what leaves -----------------------------------------------------------------------------------------------

    def _send(self, i: int, j: int, flat: Sequence[Any], task: Computation) -> None:
        """Send the flat outputs of (i, j) on: values to the next partition, skips to those that take them from here.

        Without portals skips ride along to the next partition.
        """
        skips, portals = self._partitions[j].skips, self._batch.components.portals
        count = len(flat) - len(skips.outgoing)
        last = j == len(self._partitions) - 1
        if not last:
            there = self._moved("copy", i, j, j + 1, flat[:count] if portals else flat)
            self._mailboxes.put(("F", i, j + 1, None), task.microbatch(there[:count]))
        for index, copy in enumerate(skips.outgoing, count):
            for target in skips.targets[copy]:
                value = self._moved("portal", i, j, target, flat[index : index + 1])[0] if portals else there[index]
                self._mailboxes.put(("F", i, target, copy), (value, index in task.aliased))
        if last:
            self._end.take(i, MicroBatch(tuple(flat), task.structure))

    def _send_back(self, i: int, j: int, grads: list[Tensor | None]) -> None:
        """Send gradients of the flat inputs of (i, j) to where these came from."""
        skips, portals = self._partitions[j].skips, self._batch.components.portals
        count = len(grads) - len(skips.incoming)
        if j == 0:
            self.input_grads[i] = grads
            return
        there = self._moved_back("copy", i, j - 1, j, grads[:count] if portals else grads)
        self._mailboxes.put(("B", i, j - 1, None), there[:count])
        for index, copy in enumerate(skips.incoming, count):
            source = skips.previous[copy]
            value = self._moved_back("portal", i, source, j, grads[index : index + 1])[0] if portals else there[index]
            self._mailboxes.put(("B", i, source, copy), value)

    def _moved(self, kind: str, i: int, source: int, target: int, values: Sequence[Any]) -> tuple[Any, ...]:
        """Values on the device of ``target``; they require a gradient as their originals do."""
        route = self._batch.route(kind, i, source, target)
        if route is None or not any(isinstance(value, Tensor) for value in values):
            return tuple(values)
        with torch.no_grad():
            moved = move(route, values)
        for there, here in zip(moved, values, strict=True):
            if isinstance(here, Tensor):
                there.requires_grad_(here.requires_grad)
        return moved

    def _moved_back(self, kind: str, i: int, source: int, target: int, grads: Sequence[Tensor | None]) -> list[Any]:
        route = self._batch.route(kind, i, source, target)
        if route is None or all(grad is None for grad in grads):
            return list(grads)
        return list(move_back(route, grads, self._holding))
