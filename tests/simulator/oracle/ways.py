"""The passes of a task, and what each of them asks for.

A first backward pass makes the gradients of its parameters; later ones add to them, and free what they added. Where no
task has a checkpoint, autograd sums up the gradients of all micro-batches before any becomes a parameter's. It adds in
place where it may: to a sum, and to a first gradient that is no view (torch/csrc/autograd/input_buffer.cpp). So the
second gradient of a linear layer's weight, which is a transposed one, needs room for a third.

What the engine keeps until the end of a backward pass, although the graph would let it go:

    checkpoint                inputs, gradients that came; in the published runs also outputs of the recomputation
    none                      nothing
    none, with a schedule     gradients that came, unless handed over, as that of an only output is that needs one
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Final, NamedTuple

from gpipe_bench.simulator.tracing.steps import NO_BLOCK
from gpipe_bench.simulator.workloads.workload import MemoryOp, TaskWork
from tests.simulator.oracle.allocator import Block

__all__ = [
    "GRAPH",
    "PLAIN",
    "RECOMPUTE",
    "Lent",
    "Way",
    "backward_requests",
    "kept_names",
    "last_needed",
    "new_gradients",
    "own_names",
    "passes_on",
]

_GRADIENTS: Final = frozenset({"gradient", "view"})
_SUM: Final = 2**40
"""The name of what two gradients are summed up to."""

Lent = tuple[tuple[int, int], ...]
"""Names and bytes of what a pass is the last one to need."""


class Way(NamedTuple):
    """One of the passes of a task.

    Attributes:
        name: ``plain``, ``graph``, ``recompute`` or ``backward``.
        gradients: of a backward pass, what becomes of the gradients of parameters: ``made``, ``summed`` to others out
            of place if they are views, or ``added`` to them.
        is_open: whether its graph was made by the forward pass, so that the pipeline has passed on what left it.
        scheduled: whether a schedule runs all passes.
        keeps: whether what a recomputation gave out stays until its backward pass is over.
    """

    name: str
    gradients: str = ""
    is_open: bool = False
    scheduled: bool = False
    keeps: bool = False


PLAIN: Final = Way("plain")
GRAPH: Final = Way("graph")
RECOMPUTE: Final = Way("recompute")
"""A pass with graph that lets go of what it gave out."""


def kept_names(work: TaskWork) -> frozenset[int]:
    """What the graph of a task keeps of what others know: names of inputs and of what leaves."""
    freed = {op.block for op in work.backward_memory if op.kind not in {"alloc", "scratch"}}
    inputs = {name for name in freed if name < NO_BLOCK and not name % 2}
    return frozenset(inputs | freed.intersection(work.leaving))


@cache
def own_names(names: tuple[int, ...]) -> tuple[int, ...]:
    """Names of a task's own blocks, each once."""
    return tuple(dict.fromkeys(name for name in names if name > NO_BLOCK))


@cache
def passes_on(names: tuple[int, ...]) -> bool:
    """Whether something that came to a task goes on as it is."""
    return min(names, default=0) < NO_BLOCK


def new_gradients(work: TaskWork) -> tuple[int, ...]:
    """Blocks that become the gradients of parameters that have none."""
    return tuple(op.block for op in work.backward_memory if op.kind in _GRADIENTS)


def last_needed(way: Way, lent: Mapping[int, Block], *, hands_over: bool) -> Lent:
    """What goes amid a pass: checkpoints keep what they took and what came, tasks of a schedule the latter, too.

    But if the schedule ``hands_over`` the gradient of a task's output, it goes.
    """
    if not way.is_open:
        return ()
    found = tuple((name, lent[name].requested) for name in sorted(lent) if lent[name].holders == 1)
    if way.scheduled and not hands_over:
        return tuple((name, nbytes) for name, nbytes in found if not name % 2)
    return found


def backward_requests(work: TaskWork, way: Way, lent: Collection[int]) -> list[MemoryOp]:
    """The requests of a backward pass.

    Args:
        work: the task.
        way: the pass.
        lent: what goes amid it, as :func:`last_needed` has it, by name.
    """
    left = own_names(work.leaving) if way.keeps else ()
    found: list[MemoryOp] = []
    # Of what came to the task, others hold these too.
    staying = {op.block for op in work.backward_memory if op.block < NO_BLOCK}.difference(lent).union(left)
    summed = way.gradients == "summed"
    sizes = {op.block: op.bytes for op in work.backward_memory if op.kind == "alloc"} if summed else {}
    for op in work.backward_memory:
        if op.kind in _GRADIENTS:
            if way.gradients == "made":
                continue
            if op.kind == "view" and op.block in sizes:
                # It takes the place of both, which have its size.
                found += (MemoryOp("alloc", _SUM, sizes[op.block]), MemoryOp("free", _SUM))
            found.append(MemoryOp("free", op.block))
        elif op.block not in staying or op.kind != "free":
            found.append(op)
    return found
