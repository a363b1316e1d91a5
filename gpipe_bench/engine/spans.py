"""Which partitions may share a graph, where one thread runs everything: as many as memory allows.

Fewer graphs cost the host less. But with a graph through partitions a to b one micro-batch leaves gradients of all
their parameters behind before the next one frees anything, and in the order of the clock-cycles they come one partition
after the other. Spans of partitions are taken from the last to the first, each with all micro-batches, so what the
later ones kept is free when the earlier ones get their gradients; in between, those of all micro-batches pile up:

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
        inner: what one of its tasks keeps for its backward pass beside inputs and outputs; tasks may share it.
        kept_inputs: what of the inputs it keeps.
        kept_outputs: what of the outputs it keeps, as a ReLU does: they stay when the next task has run backward.
    """

    weights: int
    inputs: int
    outputs: int
    inner: int = 0
    kept_inputs: int = 0
    kept_outputs: int = 0


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
    # Inner values may be a task's own or of all, so it has to hold both ways.
    ways = sizes, tuple(each._replace(inner=0) for each in sizes)
    most = [_Alive(way, m).after(order).peak for way in ways]
    alive = [_Alive(way, m) for way in ways]
    starts: list[int] = []
    end = len(sizes)
    while end:
        for begin in range(end):
            if cuts[begin]:
                then = [each.after_span(begin, end) for each in alive]
                if all(each.peak <= limit for each, limit in zip(then, most, strict=True)):
                    break
        else:
            return None
        starts.insert(0, begin)
        end, alive = begin, then
    return tuple(starts)


class _Alive:
    """Bytes in use while tasks run backward, beyond those in use before.

    A task takes the gradients of its outputs in, and gives those of its inputs out; the gradients of all outputs of the
    last partition are one tensor. It makes gradients of its parameters, which are there from its partition's first task
    on, and are added to what is there by the others. What it keeps goes with it, but what the task before it keeps too.

    Args:
        sizes: of each partition.
        m: micro-batches.

    Attributes:
        now: in use now.
        peak: at most so far.
    """

    def __init__(self, sizes: Sequence[Sizes], m: int, now: int = 0, peak: int = 0, met: Iterable[int] = ()) -> None:
        self.now, self.peak = now, peak
        self._sizes, self._m, self._met = sizes, m, set(met)

    def after(self, tasks: Iterable[Task]) -> _Alive:
        """When tasks have run."""
        found = _Alive(self._sizes, self._m, self.now, self.peak, self._met)
        for i, j in tasks:
            found._run(i, j)
        return found

    def after_span(self, begin: int, end: int) -> _Alive:
        """When all micro-batches have run through partitions, one after the other."""
        first, *others = range(self._m - 1, -1, -1)
        found = self.after((first, j) for j in reversed(range(begin, end)))
        if len(others) > 1:
            # From the second to the last but one each adds as much.
            found = found.after((others[0], j) for j in reversed(range(begin, end)))
            found.now += (len(others) - 2) * sum(map(self._added, range(begin, end)))
        return found.after((0, j) for j in reversed(range(begin, end)) if others)

    def _run(self, i: int, j: int) -> None:
        own, last = self._sizes[j], len(self._sizes) - 1
        self.peak = max(self.peak, self.now + own.weights + own.inputs)
        if j not in self._met:
            self.now += own.weights
            self._met.add(j)
        self.now += self._added(j) - (self._m * own.outputs if j == last and i == 0 else 0)

    def _added(self, j: int) -> int:
        """What a task of partition j adds that is not there for the whole batch."""
        own, last = self._sizes[j], len(self._sizes) - 1
        going = max(own.kept_inputs - (self._sizes[j - 1].kept_outputs if j else 0), 0)
        return own.inputs - going - own.kept_outputs - own.inner - (own.outputs if j < last else 0)
