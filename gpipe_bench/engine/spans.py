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
from functools import lru_cache
from typing import NamedTuple

from gpipe_bench.components import Components
from gpipe_bench.program import Plan, backward_order
from gpipe_bench.schedule import Task

__all__ = ["Sizes", "spans_of"]


class Sizes(NamedTuple):
    """What a partition holds, in bytes.

    Attributes:
        weights: its parameters that are trained.
        inputs: what comes into one of its tasks; nothing for the first, whose inputs are the caller's.
        outputs: what goes out of one of its tasks.
        inner: what comes and goes within one of its tasks, all or nothing of which it keeps for its backward pass.
    """

    weights: int
    inputs: int
    outputs: int
    inner: int = 0


@lru_cache(maxsize=64)
def spans_of(sizes: tuple[Sizes, ...], cuts: tuple[bool, ...], m: int, *, clock_cycle: bool) -> tuple[int, ...] | None:
    """First partitions of spans that need no more memory than a graph for each task, each as long as that allows.

    Args:
        sizes: of each partition.
        cuts: for each partition whether a span may begin there; the first is always True.
        m: micro-batches.
        clock_cycle: whether tasks with a graph for each run in the order of the clock-cycles.

    Returns:
        None if there are no such spans.
    """
    order = backward_order(Plan[str](m, len(sizes), Components(clock_cycle=clock_cycle)))
    # Which of the inner values tasks keep is not known, so it has to hold both ways.
    ways = sizes, tuple(each._replace(inner=0) for each in sizes)
    most = [_growth(way, order, m) for way in ways]
    starts: list[int] = []
    end, live = len(sizes), [0, 0]
    while end:
        for begin in range(end):
            if cuts[begin]:
                # Each micro-batch frees something, so the first two have the peak.
                tasks = [(i, j) for i in range(m - 1, max(m - 3, -1), -1) for j in reversed(range(begin, end))]
                peaks = [alive + _growth(way, tasks, m) for way, alive in zip(ways, live, strict=True)]
                if peaks[0] <= most[0] and peaks[1] <= most[1]:
                    break
        else:
            return None
        starts.insert(0, begin)
        live = [
            alive + sum(each.weights - m * (each.outputs + each.inner) for each in way[begin:end])
            for way, alive in zip(ways, live, strict=True)
        ]
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
        live -= own.inner + (own.outputs if j < last else m * own.outputs * (i == 0))
    return peak
