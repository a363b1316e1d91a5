"""Applying autograd functions, and the rank of their nodes.

Among nodes that are ready, autograd runs the one with the highest sequence number first. Numbers count up in each
thread for itself, so nodes made by the calling thread and by workers would compare by accident. While workers issue the
tasks, these rules make the order the same in every step, and that of the published engine, in which one fresh thread
issued all tasks of a device and the calling thread was old:

    2^40 ...     nodes of the lanes between tasks, made by the calling thread
    m n ...      nodes of tasks without checkpoint: worker threads are fresh, so they count from zero, and skip what
                 the checkpoints need
    0 ... m n-1  checkpoints, in the order of the clock-cycles
    2^39 ...     instead, both where all partitions are on the CPU: autograd has one thread for them, and it takes all
                 tasks in the reversed order of issue, as the one thread of a device whose tasks one worker made

A lane that leads to a recomputation before a task whose inputs need no gradient is put right below that task's nodes.

Without the clock-cycle the calling thread issues every task, its own counter does the same, and nothing is ranked.
Where it issues tasks in the place of workers, their nodes are given the numbers that those would have counted
(:class:`Numbers`): so the order, and with it every bit of the gradients, hangs on nobody's time.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import Function, Variable
from torch.autograd.function import FunctionCtx

from gpipe_bench.engine.phony import new_leaf

__all__ = [
    "LANE_RANK",
    "Made",
    "Numbers",
    "apply",
    "apply_lane",
    "can_renumber",
    "pass_through",
    "rank_of_place",
    "ranked_lanes",
    "run_backward",
    "set_rank",
    "skip_ranks",
]

LANE_RANK: Final = 2**40
"""The lowest sequence number of a lane's node; no worker makes that many nodes in one forward pass."""

PLACE_RANK: Final = 2**39
"""The lowest sequence number that a place gives: no thread counts so far, so what has been numbered is told apart."""

MOST_NODES: Final = 2**16
"""Of a task that is numbered by its place; with fewer than 2**22 tasks all those numbers are below every lane's."""

_ACCUMULATION: Final = 2**64 - 1
"""The sequence number of every node that accumulates a gradient: it runs as soon as it is ready."""

_ranks = itertools.count(LANE_RANK)


class _State(threading.local):
    ranked = False


_state = _State()


@contextmanager
def ranked_lanes(*, ranked: bool) -> Iterator[None]:
    """Rank the lanes that this thread makes in the block above every task, or do not."""
    before, _state.ranked = _state.ranked, ranked
    try:
        yield
    finally:
        _state.ranked = before


def apply(function: type[Function], *args: Any) -> tuple[Any, ...]:
    """Apply a function that returns a tuple.

    ``Function.apply`` first looks for what transforms of ``torch.func`` leave behind, at half the cost of a node;
    without one at work its base class does the rest.
    """
    base: Any = function if torch._C._are_functorch_transforms_active() else super(Function, function)  # noqa: SLF001 - as it does
    outputs: tuple[Any, ...] = base.apply(*args)
    return outputs


def apply_lane(function: type[Function], *args: Any) -> tuple[Any, ...]:
    """Apply a function of a lane: among ranked lanes its node outranks those made before it."""
    outputs = apply(function, *args)
    if _state.ranked:
        set_rank(outputs, next(_ranks))
    return outputs


def pass_through(ctx: FunctionCtx, values: Sequence[Any]) -> tuple[Any, ...]:
    """What the forward of an identity function returns: ``values``, its tensors detached.

    A function that returns its input as it is breaks autograd functions in the user's model. A gradient that is None
    reaches ``backward`` as None: zeros would be computed, and would make autograd synchronise streams.
    """
    ctx.set_materialize_grads(False)
    return tuple([value.detach() if isinstance(value, Tensor) else value for value in values])


def run_backward(roots: Sequence[Any], grads: Sequence[Tensor | None]) -> None:
    """Run backward from those of ``roots`` that are not None and have a gradient; one without counts as zero.

    Args:
        roots: tensors with a graph, or edges into one.
        grads: one for each, of its shape.
    """
    # one output is the rule
    if len(roots) == 1 and roots[0] is not None and grads[0] is not None:
        _run((roots[0],), (grads[0],))
        return
    pairs = [(root, grad) for root, grad in zip(roots, grads, strict=True) if root is not None and grad is not None]
    if pairs:
        some, theirs = zip(*pairs, strict=True)
        _run(some, theirs)


def _run(roots: tuple[Any, ...], grads: tuple[Tensor, ...]) -> None:
    # What torch.autograd.backward() calls, without its checks of shapes, which the engine makes again: they would take
    # as long as the backward pass of a small task.
    Variable._execution_engine.run_backward(  # noqa: SLF001 - see above
        roots, grads, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def set_rank(outputs: Sequence[Any], rank: int) -> None:
    """Give the node that made ``outputs`` a sequence number."""
    for output in outputs:
        node = output.grad_fn if isinstance(output, Tensor) else None
        if node is not None:
            # Absent before it was added to PyTorch; then the order is that of the counters.
            if can_renumber():
                node._set_sequence_nr(rank)  # type: ignore[attr-defined]  # noqa: SLF001 - autograd's only handle on its order
            return


def rank_of_place(i: int, j: int, n: int) -> int:
    """The first sequence number of task (i, j) on n partitions: it grows in the order in which tasks are issued."""
    return PLACE_RANK + ((i + j) * n + j) * MOST_NODES


def skip_ranks(count: int) -> None:
    """Leave the sequence numbers below ``count`` of this thread unused: there is no way but to use them up."""
    if torch.is_grad_enabled():
        phony = new_leaf(torch.device("cpu"))
        number = -1
        while number < count - 1:
            node: Any = phony.view_as(phony).grad_fn
            number = node._sequence_nr()  # noqa: SLF001 - autograd's only word on its order


@cache
def can_renumber() -> bool:
    """Whether this PyTorch lets nodes be given numbers."""
    phony = new_leaf(torch.device("cpu"))
    with torch.inference_mode(mode=False), torch.enable_grad():
        node = phony.view_as(phony).grad_fn
    return "_get_sequence_nr" in dir(torch._C._autograd) and hasattr(node, "_set_sequence_nr")  # noqa: SLF001 - as above


class Numbers:
    """Sequence numbers of tasks that the calling thread runs, as fresh workers would have counted them.

    Args:
        tasks: how many there are.
    """

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks
        self._next: dict[int, int] = {}
        # What this thread counts must be above whatever is given out: that tells which nodes a task has made.
        if _number() < 2 * tasks:
            skip_ranks(2 * tasks)

    def skip(self, worker: int) -> None:
        """What :func:`skip_ranks` does in a worker."""
        if torch.is_grad_enabled():
            self._next[worker] = max(self._next.get(worker, 0) + 1, self._tasks)

    def count(self, worker: int, job: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        """Run a job of a worker whose nodes get a rank: the next ones come after them."""
        start = _number()
        outputs = job()
        self._next[worker] = self._next.get(worker, 0) + _number() - start
        return outputs

    def renumber(self, worker: int, made: Made) -> None:
        """Give the nodes of a job the next numbers of a worker; those of others among them keep theirs."""
        first = self._next.get(worker, 0)
        self._next[worker] = first + made.count
        made.number_from(first)


class Made:
    """The nodes that a job makes.

    Args:
        inputs: where its graph begins.
        job: to be run.

    Attributes:
        outputs: what it returned.
        count: how many nodes this thread has made meanwhile.
        nodes: those of them between inputs and outputs, each with how many were made before it.
        strays: whether there are others between inputs and outputs: of other threads, of other times, or numbered anew.
        alone: whether nothing else is there: neither strays nor any of ``count`` elsewhere, and no more than
            :data:`MOST_NODES`. (The accumulation of a parameter's gradient has no number.)
    """

    def __init__(self, inputs: Sequence[Any], job: Callable[[], tuple[Any, ...]]) -> None:
        # A layer may write to them, and then they have other makers.
        ends, seen = {*_makers(inputs)}, {None}
        start = _number()
        self.outputs = job()
        end = _number()
        self.count = end - start
        nodes: list[tuple[Any, int]] = []
        strays = False
        todo = _makers(self.outputs)
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in ends:
                continue
            number = node._sequence_nr()  # noqa: SLF001 - as above
            if start <= number < end:
                nodes.append((node, number - start))
            elif number == _ACCUMULATION:
                continue
            else:
                strays = True
            for parent, _ in node.next_functions:
                todo.append(parent)  # a list comprehension costs more for one or two
        self.nodes, self.strays, self._seen = nodes, strays, seen
        self.alone = not strays and len(nodes) == self.count <= MOST_NODES

    def reaches(self, values: Sequence[Any]) -> bool:
        """Whether whatever made some of the inputs, ``values``, gets a gradient if all outputs do."""
        return self._seen.issuperset(_makers(values))

    def number_from(self, first: int) -> None:
        """Give the nodes the sequence numbers from ``first`` on, in the order in which they were made."""
        for node, number in self.nodes:
            node._set_sequence_nr(first + number)  # noqa: SLF001 - as above


def _makers(values: Sequence[Any]) -> list[Any]:
    """The nodes that made ``values``; None for what has none."""
    return [value.grad_fn for value in values if isinstance(value, Tensor)]


def _number() -> int:
    """The number of the node that this thread makes next."""
    number: int = torch._C._autograd._get_sequence_nr()  # noqa: SLF001 - as above
    return number
