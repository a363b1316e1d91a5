"""Runs drawn at random, by seeds: workloads, machines and settings that nobody would think of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from gpipe_bench.components import Components
from gpipe_bench.simulator.workloads.workload import NOTHING, SkipWork, StaticMemory, TaskWork, Workload
from tests.simulator.digests.cases import Case, Cases, CaseSettings
from tests.simulator.digests.draw import Draw
from tests.simulator.digests.pieces import FLAVOURS, MIB, MODES, Wires
from tests.simulator.digests.random_tasks import SIZES, Borders, frozen, kernels, random_task

__all__ = ["RANDOM"]

GROUPS: Final = 6
CASES: Final = 250
Named = tuple[int, ...]
Works = dict[int, TaskWork]
_SWITCHES: Final = ("clock_cycle", "fork_join", "copy_streams", "portals", "early_recompute")


class _How(NamedTuple):
    """What holds for all partitions.

    Attributes:
        unit: nanoseconds of which all times are multiples.
        zeros: whether some kernels take no time or need no launch.
        idle: how many partitions, from the first on, learn nothing.
    """

    unit: int
    zeros: bool
    idle: int


def _cases(group: int) -> Iterator[Case]:
    for number in range(CASES):
        draw = Draw(1000 * group + number)
        # Half of them with few times, so that most of what happens happens together with something else.
        unit = draw.pick((10, 10, 100_000, 137_911))
        work, machine = _workload(draw, unit), _machine(draw, unit)
        # Some were drawn for settings that are gone.
        if not (draw.chance(0.15) and draw.subset(range(3))):
            yield Case(f"{number:03}", work, machine, _settings(draw, work))


def _machine(draw: Draw, unit: int) -> Wires:
    return Wires(
        latency_ns=draw.pick((0, 1, 1, 2, 10)) * unit,
        rate=draw.pick((1, 7, 10, 10**9)),
        launch_ns=draw.pick((0, 1, unit // 10, unit)),
        queue_depth=draw.pick((0, 1, 2, 5, 12, 16, 100, 1024)),
        capacity_bytes=draw.pick((0, 0, 0, 0, 110, 160, 230, 300, 400)) * MIB,
        group=draw.pick((0, 0, 0, 1, 2)),
    )


def _settings(draw: Draw, work: Workload) -> CaseSettings:
    n = work.n
    places: tuple[tuple[int, ...], ...] = ((), (), (), (0,) * n, tuple(j // 2 for j in range(n)))
    places += (tuple(j % 2 for j in range(n)), tuple(reversed(range(n))), tuple((3 * j + 1) % 7 for j in range(n)))
    return CaseSettings(
        components=Components(**{name: draw.chance(0.7) for name in _SWITCHES}),
        checkpoint=draw.pick(MODES),
        flavour=draw.pick(FLAVOURS),
        transfer=draw.pick(("direct", "direct", "direct", "host")),
        devices=draw.pick(places),
        streams=draw.chance(0.88),
        workers=draw.chance(0.85),
        nesting_ns=draw.pick(((50_000, 100_000), (0, 0), (10, 20), (100_000, 20_000))),
        seed=draw.pick((0, 0, 1, 7, None)),
        memory=draw.chance(0.85),
        tally=draw.chance(0.1),
        steps=draw.pick((1, 2, 2, 3)),
        schedule=draw.pick((None, None, None, "gpipe")),
    )


def _workload(draw: Draw, unit: int) -> Workload:
    n = draw.pick((1, 2, 2, 3, 3, 4, 5, 6))
    m = draw.pick((1, 2, 3, 4, 5, 7, 9, 40))
    sizes = (*(2,) * (m - 1), draw.pick((1, 2)))
    ways = _ways(draw, n)
    idle = draw.pick((0, 0, 0, 0, 1, n - 1)) if n > 1 else 0
    skips = tuple(
        SkipWork(f"s{at}", *way, {1: draw.pick(SIZES), 2: draw.pick(SIZES)}, way[0] >= idle and draw.chance(0.85))
        for at, way in enumerate(ways)
    )
    borders: list[Named] = [tuple(draw.some(SIZES, 1, draw.pick((1, 1, 2, 3)))) for _ in range(n + 1)]
    if draw.chance(0.3):
        borders = [borders[0]] * (n + 1)
    zeros = draw.chance(0.2)
    how = _How(unit, zeros, idle)
    parts = tuple(_partition(draw, j, how, borders, skips) for j in range(n))
    memory: dict[str, Any] = {}
    if draw.chance(0.6):
        memory["static"] = tuple(_static(draw) for _ in range(n))
    elif draw.chance(0.5):
        memory["static_bytes"] = tuple(draw.pick(SIZES) for _ in range(n))
    update = tuple(kernels(draw, unit, zeros=zeros) for _ in range(n)) if draw.chance(0.6) else ()
    loss = kernels(draw, unit, zeros=zeros) if draw.chance(0.6) else NOTHING
    return Workload(parts, sizes, skips, loss=loss, optimizer=update, **memory)


def _ways(draw: Draw, n: int) -> list[tuple[int, int]]:
    """Source and target of skips; some stay within a partition."""
    if n == 1 or draw.chance(0.4):
        return []
    sources = sorted(draw.some(range(n - 1), 1, 4))
    return [(source, source if draw.chance(0.08) else draw.number(source + 1, n - 1)) for source in sources]


def _static(draw: Draw) -> StaticMemory:
    sizes = [tuple(draw.some(SIZES, 0, 3)) for _ in range(2)]
    return StaticMemory(sizes[0], draw.pick(SIZES), sizes[1], draw.pick((0, *SIZES)))


def _partition(draw: Draw, j: int, how: _How, borders: Sequence[Named], skips: Sequence[SkipWork]) -> Works:
    """The work of partition j by micro-batch size."""
    slow, n = draw.pick((1, 1, 1, 1, 30)), len(borders) - 1
    arriving = [skip for skip in skips if skip.target == j != skip.source]
    departing = [skip for skip in skips if skip.source == j != skip.target]
    unreturned = _unreturned(draw, j, how.idle, len(borders[j]), arriving)
    found: dict[int, TaskWork] = {}
    for size in (1, 2):
        own = Borders(
            first=not j,
            last=j == n - 1,
            entering=borders[j],
            going=borders[j + 1],
            arriving=tuple(skip.bytes[size] for skip in arriving),
            departing=tuple(skip.bytes[size] for skip in departing),
            unreturned=unreturned,
        )
        forward, again, backward = (kernels(draw, how.unit * times, zeros=how.zeros) for times in (1, 1, slow))
        work = random_task(draw, (forward, again, backward), own)
        if j < how.idle:
            work = frozen(work, first=own.first)
        elif draw.chance(0.15):
            # A checkpoint copies something.
            work = replace(work, checkpointed=random_task(draw, (again, again, backward), own))
        found[size] = work
    return found


def _unreturned(draw: Draw, j: int, idle: int, inputs: int, arriving: Sequence[SkipWork]) -> frozenset[int]:
    """Places of inputs and skips without a gradient: all inputs that come from a partition that learns nothing."""
    lost = {place for place in range(1, inputs) if draw.chance(0.15)} if j else set()
    if 0 < j <= idle:
        lost = set(range(inputs))
    return frozenset(lost | {inputs + place for place, skip in enumerate(arriving) if not skip.returns})


RANDOM: Final[dict[str, Cases]] = {f"random-{group}": partial(_cases, group) for group in range(GROUPS)}
"""The groups."""
