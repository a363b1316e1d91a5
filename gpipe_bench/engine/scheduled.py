"""The scheduled backward pass seen from autograd: three nodes, between which the workers do the work.

    inputs ── Enter ── phony ── Drive ── phony ── Collect ── outputs

Backward, Collect takes the gradients of all outputs, Drive runs the tasks of all partitions, and Enter hands out the
gradients of the inputs. Collect and Enter are nodes of their devices, so autograd orders their streams. Drive is one of
the CPU, which autograd runs in the thread that called ``backward()``: the thread of a device must stay free, since the
workers' own backward passes need it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from gpipe_bench.engine.autograd import apply
from gpipe_bench.engine.checkpoint import check_whole
from gpipe_bench.engine.granularity import Contest, timed, undisturbed
from gpipe_bench.engine.microbatch import MicroBatch, Values
from gpipe_bench.engine.microbatch_lanes import MicroBatchLanes
from gpipe_bench.engine.phony import get_phony, new_leaf
from gpipe_bench.engine.scheduled_lanes import ScheduledLanes
from gpipe_bench.engine.skip.namespace import SkipKey
from gpipe_bench.engine.streams import Stream, current_stream, wait_stream
from gpipe_bench.engine.worker import Workers
from gpipe_bench.program import Plan, backward_order, run_backward_task

__all__ = ["BackwardPass", "attach"]

_CPU = torch.device("cpu")
_Task = tuple[int, int]
_Failure = tuple[_Task, BaseException]
_Lend = Callable[[Sequence[int]], AbstractContextManager[Workers]]


class BackwardPass:
    """The backward pass of one batch, which can be run once.

    Args:
        plan: of its forward pass.
        lanes: what the forward pass left.
        places: for each partition its device, its compute stream, and the caller's stream on the device.
        workers: the worker of each partition, or nothing to run all tasks in the thread that runs backward.
        lend: lends workers.
        contest: decides between the workers and the thread that runs backward, if that may be asked.
    """

    def __init__(
        self,
        plan: Plan[SkipKey],
        lanes: ScheduledLanes | MicroBatchLanes,
        places: list[tuple[torch.device, Stream, Stream]],
        workers: list[int],
        lend: _Lend,
        *,
        contest: Contest | None,
    ) -> None:
        self.places = places
        self._plan = plan
        self._lanes: ScheduledLanes | MicroBatchLanes | None = lanes
        self._workers = workers
        self._lend: _Lend | None = lend
        self._contest = contest
        self._failed = False
        self._failures: list[_Failure] = []
        self._input_grads: list[Tensor | None] = []

    def take(self, grads: tuple[Tensor | None, ...]) -> None:
        """Take the gradients of all outputs, micro-batch by micro-batch."""
        check_whole("backward='scheduled'", "backward='autograd' and checkpoint='never'")
        if torch._C._autograd._get_current_graph_task_keep_graph():  # noqa: SLF001 - autograd's only word on it
            raise RuntimeError(
                "a scheduled backward pass must be the only one of its batch, got retain_graph=True; add the losses "
                "up, or use backward='autograd'"
            )
        if self._lanes is None:
            raise RuntimeError(
                "a scheduled backward pass must be the only one of its batch, got a second one; add the losses up, or "
                "use backward='autograd'"
            )
        for _, computing, callers in self.places:
            wait_stream(computing, callers)
        count = len(grads) // self._plan.m
        for i in range(self._plan.m):
            self._lanes.take_grads(i, grads[i * count : (i + 1) * count])

    def run(self) -> None:
        """Run every task; afterwards the caller's streams come after all of them.

        Raises:
            Exception: the first that a task raised; the tasks after it are left out.
        """
        # A loss that is kept keeps neither what the forward pass left nor the workers.
        lanes, self._lanes, lend, self._lend = self._lanes, None, self._lend, None
        if lanes is None or lend is None:
            return
        # The thread of a device, in a backward pass within a backward pass, is itself needed to run tasks.
        inline = not self._workers or isinstance(threading.current_thread(), threading._DummyThread)  # noqa: SLF001
        contest = None if inline or not undisturbed() else self._contest
        if isinstance(lanes, MicroBatchLanes):
            with timed(contest, inline=True):
                lanes.run()
        else:
            inline = inline or (contest is not None and contest.inline())
            with timed(contest, inline=inline):
                self._run_tasks(lanes, None if inline else lend)
        self._input_grads = [grad for grads in lanes.input_grads for grad in grads]

    def input_grads(self) -> list[Tensor | None]:
        """Gradients of the inputs, micro-batch by micro-batch; they are kept no longer."""
        grads, self._input_grads = self._input_grads, []
        return grads

    def _run_tasks(self, lanes: ScheduledLanes, lend: _Lend | None) -> None:
        order = backward_order(self._plan)
        if lend is None:
            self._tasks(lanes, order)
        else:
            self._spread(lanes, order, lend)
        # Compute streams of their own wait for the caller's before every batch and every backward pass, and these
        # for those afterwards: so what passes between them needs no record_stream.
        for device, computing, callers in self.places:
            for stream in (callers, current_stream(device)):
                wait_stream(stream, computing)
        if self._failures:
            position = {task: number for number, task in enumerate(order)}
            _, error = min(self._failures, key=lambda failure: position[failure[0]])
            self._failures.clear()
            try:
                raise error
            finally:
                # Its traceback holds this frame, which must not hold it: the batch would stay until a collection.
                del error

    def _spread(self, lanes: ScheduledLanes, order: list[_Task], lend: _Lend) -> None:
        indices = sorted(set(self._workers))
        with lend(indices) as workers:
            for index in indices:
                mine = [(i, j) for i, j in order if self._workers[j] == index]
                workers.submit(index, partial(self._tasks, lanes, mine))
            try:
                for index in indices:
                    workers.collect(index)
            except BaseException:
                # An interrupt, of the thread that only waits: no task begins, and no gradient comes after it.
                self._failed = True
                workers.end()
                raise

    def _tasks(self, lanes: ScheduledLanes, tasks: list[_Task]) -> None:
        """Run tasks in order; after an exception, here or elsewhere, only let the others go on."""
        for i, j in tasks:
            if not self._failed:
                try:
                    run_backward_task(self._plan, lanes, i, j)
                except BaseException as error:  # noqa: BLE001 - it belongs to the thread that called backward()
                    self._failures.append(((i, j), error))
                    self._failed = True
                else:
                    continue
            if j > 0:
                lanes.release(j - 1)


class Enter(Function):
    """(pass, inputs...) -> a phony on the first device; backward gives the gradients of the inputs."""

    @staticmethod
    def forward(ctx: Any, backward_pass: BackwardPass, which: list[int], *inputs: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.backward_pass = backward_pass
        ctx.which = which
        return get_phony(inputs[0].device).detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        grads = ctx.backward_pass.input_grads()
        return (None, None, *(grads[index] for index in ctx.which))


class Drive(Function):
    """(pass, phony) -> a phony on the CPU; backward runs all tasks."""

    @staticmethod
    def forward(ctx: Any, backward_pass: BackwardPass, _: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.backward_pass = backward_pass
        return get_phony(_CPU).detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        ctx.backward_pass.run()
        return (None, None)


class Collect(Function):
    """(pass, phony, (outputs...)) -> outputs; backward takes their gradients."""

    @staticmethod
    def forward(ctx: Any, backward_pass: BackwardPass, frozen: list[int], _: Tensor, values: Values) -> Values:
        ctx.set_materialize_grads(False)
        ctx.backward_pass = backward_pass
        outputs = tuple([value.detach() if isinstance(value, Tensor) else value for value in values])
        ctx.mark_non_differentiable(*[outputs[index] for index in frozen])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
        ctx.backward_pass.take(grads)
        return (None, None, None, None)


def attach(backward_pass: BackwardPass, inputs: list[MicroBatch], outputs: list[MicroBatch]) -> list[MicroBatch]:
    """``outputs`` with a graph in which ``backward_pass`` leads to ``inputs``.

    Args:
        backward_pass: of the batch.
        inputs: the micro-batches as they came.
        outputs: what the last partition made of them.
    """
    flat = tuple([value for microbatch in outputs for value in microbatch.values])
    frozen = [index for index, value in enumerate(flat) if isinstance(value, Tensor) and not value.requires_grad]
    if not any(isinstance(value, Tensor) and value.requires_grad for value in flat):
        return outputs
    entering = [value for microbatch in inputs for value in microbatch.values]
    which = [index for index, value in enumerate(entering) if isinstance(value, Tensor) and value.requires_grad]
    if which:
        (phony,) = _one(apply(Enter, backward_pass, which, *(entering[index] for index in which)))
    else:
        phony = new_leaf(_CPU)
    (phony,) = _one(apply(Drive, backward_pass, phony))
    collected = apply(Collect, backward_pass, frozen, phony, flat)
    return _regrouped(collected, outputs)


def _one(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def _regrouped(flat: Values, like: list[MicroBatch]) -> list[MicroBatch]:
    values = iter(flat)
    return [MicroBatch(tuple(next(values) for _ in microbatch.values), microbatch.structure) for microbatch in like]
