"""Traces at every batch size from traces at three: what grows linearly with the samples needs no other.

The first two sizes give constant and slope of every integer in a trace, the third one checks them all. A layer whose
steps differ between the sizes, or whose numbers do not lie on one line, has no scalable trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from gpipe_bench.kernels.kernel import Alloc, Kernel, LayerTrace, Port, Step

PROBES: Final = (4, 6, 4098)
"""Batch sizes that are traced; even ones, since some layers halve the batch, and one that is larger than the parts into
which others cut it."""


@dataclass(frozen=True, slots=True)
class ScalableTrace:
    """A trace at the first probe, and by how much each of its numbers grows per sample."""

    base: LayerTrace
    slopes: tuple[int, ...]

    def at(self, size: int) -> LayerTrace:
        """The trace for a micro-batch of ``size`` samples."""
        more, slopes = size - PROBES[0], iter(self.slopes)
        return _mapped(self.base, lambda number: number + next(slopes) * more)


def fit_line(traces: Sequence[LayerTrace]) -> ScalableTrace | None:
    """The scalable trace through traces at :data:`PROBES`; None if no line goes through all of them."""
    low, high, check = traces
    numbers = [_numbers(trace) for trace in traces]
    if len({len(row) for row in numbers}) > 1:
        return None
    rises = [(after - before, PROBES[1] - PROBES[0]) for before, after in zip(numbers[0], numbers[1], strict=True)]
    if any(rise % run for rise, run in rises):
        return None
    line = ScalableTrace(low, tuple(rise // run for rise, run in rises))
    return line if line.at(PROBES[1]) == high and line.at(PROBES[2]) == check else None


def _numbers(trace: LayerTrace) -> list[int]:
    found: list[int] = []

    def note(number: int) -> int:
        found.append(number)
        return number

    _mapped(trace, note)
    return found


def _mapped(trace: LayerTrace, change: Callable[[int], int]) -> LayerTrace:
    """The trace with its numbers changed, one after the other."""

    def ports(old: Sequence[Port]) -> tuple[Port, ...]:
        return tuple(replace(port, bytes=change(port.bytes)) for port in old)

    def steps(old: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(map(changed, old))

    def changed(old: Step) -> Step:
        if isinstance(old, Kernel):
            return old.mapped(change)
        return replace(old, bytes=change(old.bytes)) if isinstance(old, Alloc) else old

    return replace(
        trace,
        outputs=ports(trace.outputs),
        plain_outputs=ports(trace.plain_outputs),
        forward=steps(trace.forward),
        plain=steps(trace.plain),
        backward=steps(trace.backward),
    )
