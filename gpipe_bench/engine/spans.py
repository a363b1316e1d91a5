"""Which partitions may share a graph, where one thread runs everything: as many as memory allows.

Fewer graphs cost the host less. But with a graph through partitions a to b one micro-batch leaves gradients of all
their parameters behind before the next one frees anything, and in the order of the clock-cycles they come one partition
after the other. Spans of partitions are taken from the last to the first, each with all micro-batches, so what the
later ones kept is free when the earlier ones get their gradients:

    one span     B(m-1, n-1) ... B(m-1, 0)   B(m-2, n-1) ... B(m-2, 0)   ...
    two spans    B(m-1, n-1) ... B(m-1, k)   B(m-2, n-1) ... B(m-2, k)   ...   then B(m-1, k-1) ... B(m-1, 0)   ...
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from gpipe_bench.components import Components
from gpipe_bench.program import Plan, backward_order
from gpipe_bench.schedule import Task

__all__ = ["Sizes", "spans_of"]


@dataclass(frozen=True)
class Sizes:
    """What a partition holds, in bytes.

    Attributes:
        weights: its parameters.
        inputs: what comes into one of its tasks; nothing for the first, whose inputs are the caller's.
        outputs: what goes out of one of its tasks.
    """

    weights: int
    inputs: int
    outputs: int


@lru_cache(maxsize=64)
def spans_of(sizes: tuple[Sizes, ...], cuts: tuple[bool, ...], m: int, *, clock_cycle: bool) -> tuple[int, ...] | None:
    """First partitions of as few spans as need no more memory than a graph for each task; None if none do.

    Args:
        sizes: of each partition.
        cuts: for each partition whether a span may begin there; the first is always True.
        m: micro-batches.
        clock_cycle: whether tasks with a graph for each run in the order of the clock-cycles.
    """
    plan = Plan[str](m, len(sizes), Components(clock_cycle=clock_cycle))
    most = _growth(sizes, backward_order(plan), m)
    starts: list[int] = []
    end, live = len(sizes), 0
    while end:
        for begin in range(end):
            if cuts[begin]:
                # Each micro-batch frees something, so the first two have the peak.
                tasks = [(i, j) for i in range(m - 1, max(m - 3, -1), -1) for j in reversed(range(begin, end))]
                if live + _growth(sizes, tasks, m) <= most:
                    break
        else:
            return None
        starts.insert(0, begin)
        live += sum(each.weights - m * each.outputs for each in sizes[begin:end])
        end = begin
    return tuple(starts)


def _growth(sizes: Sequence[Sizes], tasks: Iterable[Task], m: int) -> int:
    """By how much bytes in use grow at most while tasks run backward.

    A task takes the gradients of its outputs in, and gives those of its inputs out; the gradients of all outputs of the
    last partition are one tensor. It makes gradients of its parameters, which are there from its partition's first task
    on, and are added to what is there by the others.
    """
    last, live, peak, met = len(sizes) - 1, 0, 0, set[int]()
    for i, j in tasks:
        own = sizes[j]
        peak = max(peak, live + own.weights + own.inputs)
        if j not in met:
            live += own.weights
            met.add(j)
        # Its inputs go, and their gradients come.
        live -= own.outputs if j < last else m * own.outputs * (i == 0)
    return peak
