"""Tasks drawn at random: durations, requests for memory, and which blocks their outputs and gradients are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from gpipe_bench.simulator.workloads.workload import Kernels, MemoryOp, TaskWork, gradient_name, input_name
from tests.simulator.digests.draw import Draw
from tests.simulator.digests.pieces import alloc, free

__all__ = ["SIZES", "Borders", "frozen", "kernels", "random_task"]

# Of the small pool; of the large one, where the rest of a block may be too small to be split off; with its own segment.
_KIB_SIZES: Final = (40, 1000, 1024, 1200, 3000, 9999, 11000, 20001)
SIZES: Final = (0, 1, 700, *(1024 * size for size in _KIB_SIZES))
"""Bytes of tensors."""

Named = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Borders:
    """What crosses the borders of a partition.

    Attributes:
        first: whether it is the first partition.
        last: whether it is the last one.
        entering: bytes of its inputs, without skips.
        going: bytes of its outputs, without skips.
        arriving: bytes of the skips that come from other partitions.
        departing: bytes of the skips that go to others.
        unreturned: places, among inputs and arriving skips, for which no gradient goes back.
    """

    first: bool
    last: bool
    entering: Named
    going: Named
    arriving: Named = ()
    departing: Named = ()
    unreturned: frozenset[int] = frozenset()

    @property
    def inputs(self) -> Named:
        """All that comes."""
        return self.entering + self.arriving

    @property
    def outputs(self) -> Named:
        """All that goes."""
        return self.going + self.departing


def kernels(draw: Draw, unit: int, *, zeros: bool) -> Kernels:
    """Kernels of some multiples of a time; with ``zeros`` some take no time, or need no launch."""
    duration, launches = unit * draw.number(0 if zeros else 1, 12), draw.number(0 if zeros else 1, 4)
    return Kernels(duration * draw.pick((1, 1, 1, 10)), launches * draw.pick((1, 1, 8)))


def random_task(draw: Draw, times: tuple[Kernels, Kernels, Kernels], borders: Borders) -> TaskWork:
    """A task that learns; ``times``: of its passes."""
    count = len(borders.entering)
    lost = [place in borders.unreturned for place in range(count)]
    return TaskWork(
        *times,
        input_bytes=borders.entering,
        output_bytes=borders.going,
        nodes=draw.pick((1, 1, 3, 40)),
        returns=tuple(not one for one in lost) if any(lost) else (),
        **_memory(draw, borders),
    )


def frozen(work: TaskWork, *, first: bool) -> TaskWork:
    """The same task with nothing to learn: its pass with graph keeps nothing but what leaves."""
    made = {op.block for op in work.graph_memory if op.kind == "alloc"}
    gone = {op.block for op in work.graph_memory if op.kind == "free"}
    frees = [free(name) for name in sorted(made - gone - {*work.leaving})]
    return replace(
        work,
        learns=False,
        graph_memory=(*work.graph_memory, *frees),
        backward_memory=(),
        returning=(),
        returns=() if first else (False,) * len(work.input_bytes),
    )


def _memory(draw: Draw, borders: Borders) -> dict[str, Any]:
    """Requests of the passes, and the blocks of what leaves and returns."""
    inputs, outputs = borders.inputs, borders.outputs
    first = len(outputs) + len(inputs)
    leaving, returning = _leaving(draw, borders), _returning(draw, borders)
    own = [alloc(first + place, nbytes) for place, nbytes in enumerate(draw.some(SIZES, 0, 5))]
    out = [alloc(block, outputs[block]) for block in dict.fromkeys(leaving) if block >= 0]
    freed = [free(op.block) for op in own]
    kept = draw.number(0, len(own))
    extra = [alloc(100, draw.pick(SIZES)), free(100)]
    parameters = [alloc(200 + place, nbytes) for place, nbytes in enumerate(draw.some(SIZES, 0, 3))]
    back = [alloc(block, inputs[block - len(outputs)]) for block in dict.fromkeys(returning) if block >= 0]
    gradients = [MemoryOp(draw.pick(("gradient", "view")), op.block) for op in parameters]
    backward = [*extra, *parameters, *_known(draw, leaving, borders), *back, *freed[:kept], *gradients]
    return {
        "forward_memory": _with_scratch(draw, [*own, *out, *freed]),
        "graph_memory": _with_scratch(draw, [*own, *out, *freed[kept:]]),
        "backward_memory": _with_scratch(draw, backward),
        "leaving": leaving,
        "returning": returning,
    }


def _leaving(draw: Draw, borders: Borders) -> Named:
    """Blocks of what leaves: each its own, one that is an input as it came, one that is another one, or none at all."""
    if draw.chance(0.3):
        return ()
    outputs, found = borders.outputs, list(range(len(borders.outputs)))
    if borders.first or borders.last:
        return tuple(found)
    if draw.chance(0.4):
        place = draw.pick(found)
        alike = [at for at, nbytes in enumerate(borders.inputs) if nbytes == outputs[place]]
        found[place] = input_name(draw.pick(alike)) if alike else -1
    if len(found) > 1 and draw.chance(0.25):
        found[-1] = found[0]
    return tuple(found)


def _returning(draw: Draw, borders: Borders) -> Named:
    """Blocks of the gradients of what came, likewise; the first partition returns none."""
    if borders.first or draw.chance(0.3):
        return ()
    inputs, outputs = borders.inputs, borders.outputs
    found = list(range(len(outputs), len(outputs) + len(inputs)))
    if draw.chance(0.3):
        found[0] = -1
    if not borders.last and draw.chance(0.3):
        place = draw.number(0, len(found) - 1)
        alike = [at for at, nbytes in enumerate(outputs) if nbytes == inputs[place]]
        found[place] = gradient_name(draw.pick(alike)) if alike else found[place]
    if len(found) > 1 and not borders.last and draw.chance(0.2):
        found[-1] = found[0]
    return tuple(-1 if place in borders.unreturned else name for place, name in enumerate(found))


def _known(draw: Draw, leaving: Named, borders: Borders) -> list[MemoryOp]:
    """What the graph keeps of what others know, and the gradients that the backward pass is done with."""
    made = [block for block in dict.fromkeys(leaving) if block >= 0]
    names = made if draw.chance(0.5) else []
    names += map(input_name, draw.subset(range(len(borders.inputs))))
    if draw.chance(0.5):
        names += map(gradient_name, range(len(borders.outputs)))
    return [free(name) for name in names]


def _with_scratch(draw: Draw, ops: Sequence[MemoryOp]) -> tuple[MemoryOp, ...]:
    """Requests with some for scratch memory in between."""
    found = list(ops)
    while draw.chance(0.3):
        found.insert(draw.number(0, len(found)), MemoryOp("scratch", draw.number(0, 3), draw.pick(SIZES)))
    return tuple(found)
