"""Machines and stages that cases are made of: everything is written out, so that nothing here changes by itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from gpipe_bench.components import Components
from gpipe_bench.simulator.workloads.workload import (
    HOST,
    Kernels,
    MemoryOp,
    SkipWork,
    StaticMemory,
    TaskWork,
    Workload,
    input_name,
)
from tests.simulator.digests.draw import Draw

__all__ = [
    "COMBINATIONS", "FLAVOURS", "MIB", "MODES", "Wires", "alloc", "free", "grid", "some_components", "stage", "uneven",
    "with_sizes", "with_skips",
]  # fmt: skip

MIB: Final = 2**20
US: Final = 1000
MODES: Final = ("always", "except_last", "never")
FLAVOURS: Final = ("current", "published")
COMBINATIONS: Final = tuple(Components.factorial())


@dataclass(frozen=True)
class Wires:
    """A machine whose links take some time and a byte per ``rate`` of a nanosecond.

    Attributes:
        latency_ns: of an empty transfer.
        rate: bytes per nanosecond.
        group: devices of one group; 0: no link is shared.
    """

    latency_ns: int = 5 * US
    rate: int = 10
    launch_ns: int = 10 * US
    lock_permille: int = 0
    queue_depth: int = 1024
    capacity_bytes: int = 0
    group: int = 0

    def copy_ns(self, source: int, target: int, nbytes: int) -> int:
        if source == target:
            return nbytes // (20 * self.rate)
        slower = 2 if HOST in (source, target) else 1
        return self.latency_ns + slower * nbytes // self.rate

    def buses(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        if not self.group or HOST in (source, target) or source // self.group == target // self.group:
            return ()
        return ((min(source, target) // self.group, max(source, target) // self.group),)


def some_components(number: int) -> Components:
    """One of the combinations, drawn by a number, so that it does not go with anything else that changes in a grid."""
    return Draw(number).pick(COMBINATIONS)


def grid(**axes: Sequence[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every combination of values, with a name that says the values; a combination of components by its label."""
    for values in product(*axes.values()):
        words = [_word(name, value) for name, value in zip(axes, values, strict=True)]
        yield " ".join(words), dict(zip(axes, values, strict=True))


def _word(name: str, value: Any) -> str:
    if isinstance(value, Components):
        return value.label
    if isinstance(value, bool):
        return name if value else f"no-{name}"
    if isinstance(value, tuple):
        return f"{name}={'-'.join(map(str, value))}"
    return value if isinstance(value, str) else f"{name}={value}"


def alloc(block: int, nbytes: int) -> MemoryOp:
    return MemoryOp("alloc", block, nbytes)


def free(block: int) -> MemoryOp:
    return MemoryOp("free", block)


def stage(
    forward: int = 1000,
    backward: int = 2000,
    *,
    launches: int = 12,
    graph: int = 30 * MIB,
    size: int = 2 * MIB,
    scratch: int = 0,
    **options: Any,
) -> TaskWork:
    """A task whose graph keeps a large block, its input and its output; ``forward`` and ``backward`` in microseconds.

    Args:
        scratch: bytes of scratch memory that each pass asks for.
        options: further fields of the task.
    """
    rough = (MemoryOp("scratch", 7, scratch),) if scratch else ()
    fields: dict[str, Any] = {
        "forward_memory": (alloc(0, graph), *rough, alloc(1, size), free(0)),
        "graph_memory": (alloc(0, graph), *rough, alloc(1, size)),
        "backward_memory": (alloc(2, 3 * MIB), *rough, free(0), free(1), free(input_name(0)), free(2)),
        "leaving": (1,),
        "input_bytes": (size,),
        "output_bytes": (size,),
        **options,
    }
    times = Kernels(forward * US, launches), Kernels(forward * US, launches), Kernels(backward * US, 2 * launches)
    return TaskWork(*times, **fields)


def uneven(n: int, **options: Any) -> list[TaskWork]:
    """Stages of which no two take equally long, each with as many bytes at its borders as the others."""
    times = [(700 + 410 * (5 * j % 7), 1500 + 730 * (3 * j % 5)) for j in range(n)]
    return [stage(*both, launches=8 + 3 * j, graph=(20 + 4 * (j % 3)) * MIB, **options) for j, both in enumerate(times)]


def with_sizes(m: int, stages: Sequence[TaskWork], *, rest: bool = False, **options: Any) -> Workload:
    """m micro-batches; ``rest``: the last one is smaller and takes half as long.

    Each partition has parameters of two sizes, an optimizer's state and an update.
    """
    parts: list[dict[int, TaskWork]] = [{2: work, 1: _half(work)} if rest else {2: work} for work in stages]
    sizes = (*(2,) * (m - 1), 1 if rest else 2)
    n = len(parts)
    fields: dict[str, Any] = {
        "loss": Kernels(300 * US, 6),
        "optimizer": tuple(Kernels((200 + 30 * j) * US, 4 + j) for j in range(n)),
        "static": tuple(StaticMemory((5 * MIB, 600), 5 * MIB + 600, (5 * MIB, 600), (1 + j) * MIB) for j in range(n)),
        **options,
    }
    return Workload(tuple(parts), sizes, **fields)


def _half(work: TaskWork) -> TaskWork:
    def less(kernels: Kernels) -> Kernels:
        return Kernels(kernels.duration_ns // 2, kernels.launches)

    return replace(work, forward=less(work.forward), recompute=less(work.recompute), backward=less(work.backward))


def with_skips(work: Workload, ways: Sequence[tuple[int, int]], nbytes: int = 3 * MIB, **options: Any) -> Workload:
    """A workload with skips, whose tensors the simulation makes; some are of other sizes than others."""
    skips = tuple(
        SkipWork(f"s{number}", *way, {1: nbytes // 2 + number, 2: nbytes + 512 * number}, **options)
        for number, way in enumerate(ways)
    )
    touched = {end for way in ways for end in way}
    parts = tuple(
        {size: replace(one, leaving=(), returning=()) if j in touched else one for size, one in works.items()}
        for j, works in enumerate(work.partitions)
    )
    return replace(work, partitions=parts, skips=skips)
