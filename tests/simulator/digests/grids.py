"""Grids of settings over chains by hand: every combination of components, and every way to run them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, Final

from gpipe_bench.components import Components
from gpipe_bench.simulator.workloads.workload import Machine, Workload
from tests.simulator.digests.cases import Case, Cases, CaseSettings
from tests.simulator.digests.pieces import (
    COMBINATIONS,
    FLAVOURS,
    MIB,
    MODES,
    Wires,
    grid,
    some_components,
    stage,
    uneven,
    with_sizes,
    with_skips,
)

__all__ = ["GRIDS"]

HOST: Final = Wires()
WAYS: Final = ((0, 3), (1, 2), (1, 4), (3, 4))
"""Skips of five partitions: over some, to the next, and two from one."""

CHAINS: Final = {
    "chain-1x5": with_sizes(5, [stage()]),
    "chain-2x4": with_sizes(4, uneven(2), rest=True),
    "chain-4x8": with_sizes(8, [stage()] * 4),
    "chain-8x6": with_sizes(
        6, uneven(8, input_bytes=(2 * MIB, 700), output_bytes=(2 * MIB, 700), leaving=(1, -1)), rest=True
    ),
    # More micro-batches than a pool has streams.
    "chain-3x40": with_sizes(40, uneven(3)),
}
SKIPPING: Final = with_skips(with_sizes(6, uneven(5), rest=True), WAYS)
LABELS: Final = tuple(map(Components.from_label, ("dep-str-ptl", "baseline", "dep-x-ptl", "x-str-x-x-rec")))


def _cases(
    work: Workload, machine: Machine = HOST, *, turn: Iterator[int] | None = None, fixed: Any = None, **axes: Any
) -> Iterator[Case]:
    """A case for each combination of settings.

    Args:
        work: the workload of all.
        machine: the machine of all.
        turn: counts cases that have other components each; None: components are those of ``fixed`` and ``axes``.
        fixed: settings that are the same in all.
        axes: values of settings.
    """
    for words, values in grid(**axes):
        chosen = {**(fixed or {}), **values}
        name = words
        if turn is not None:
            chosen["components"] = some_components(next(turn))
            name = f"{words} {chosen['components'].label}"
        yield Case(name, work, machine, CaseSettings(**chosen))


def chain(work: Workload) -> Iterator[Case]:
    """The 384 ways to run a chain."""
    return _cases(
        work,
        fixed={"steps": 2},
        flavour=FLAVOURS,
        checkpoint=MODES,
        components=COMBINATIONS,
        memory=(True, False),
    )


def schedules() -> Iterator[Case]:
    """Two schedules: times alone, with memory, and with bytes of tensors alone."""
    turn, names = count(), ("gpipe", "1f1b")
    axes: dict[str, Any] = {"schedule": names, "checkpoint": MODES, "components": COMBINATIONS}
    for name, work in (("2x4", CHAINS["chain-2x4"]), ("skips", SKIPPING)):
        found = _cases(work, fixed={"steps": 2, "memory": False}, transfer=("direct", "host"), **axes)
        yield from (replace(case, name=f"{name} times {case.name}") for case in found)
    for name, tally in (("memory", False), ("tally", True)):
        found = _cases(SKIPPING, fixed={"steps": 2, "tally": tally}, **axes)
        yield from (replace(case, name=f"{name} {case.name}") for case in found)
    places = ((0, 0, 1, 1, 0), (0,) * 5, (4, 3, 2, 1, 0))
    ways: dict[str, Any] = {"transfer": ("direct", "host"), "devices": places, "workers": (True, False)}
    ways |= {"streams": (True, False), "schedule": names, "checkpoint": MODES, "flavour": FLAVOURS}
    yield from _cases(SKIPPING, turn=turn, fixed={"steps": 2}, **ways)


def steps() -> Iterator[Case]:
    """One step, two and three, and as many as it takes where threads race."""
    axes: dict[str, Any] = {"flavour": FLAVOURS, "checkpoint": MODES, "components": LABELS}
    yield from _cases(CHAINS["chain-4x8"], steps=(1, 2, 3), **axes)
    work = with_skips(with_sizes(8, uneven(5)), WAYS)
    racing = [one for one in COMBINATIONS if not one.fork_join and one.clock_cycle and one.early_recompute]
    fixed = {"flavour": "published", "steps": 33}
    yield from _cases(work, fixed=fixed, checkpoint=MODES[:2], components=racing, seed=(0, 1, None))
    yield from _cases(work, fixed={**fixed, "memory": False}, checkpoint=MODES[:2], components=racing[:1], seed=(2, 3))


def mechanisms() -> Iterator[Case]:
    """Both engines with every mode, and times of nested backward passes."""
    axes: dict[str, Any] = {"flavour": FLAVOURS, "checkpoint": MODES, "components": LABELS}
    found = _cases(SKIPPING, fixed={"steps": 2}, **axes)
    yield from (replace(case, name=f"none {case.name}") for case in found)
    nesting = ((0, 0), (0, 100_000), (50_000, 0), (60_000, 60_000), (400_000, 20_000))
    fixed = {"flavour": "published", "steps": 3}
    yield from _cases(
        SKIPPING, fixed=fixed, checkpoint=MODES[:2], components=LABELS, nesting_ns=nesting, seed=(0, 5, None)
    )


def queues() -> Iterator[Case]:
    """Launch queues that are full, hosts that are slow, and hosts that take no time."""
    turn = count()
    for name, values in grid(queue_depth=(0, 1, 2, 5, 16, 100), launch_ns=(0, 1, 10_000, 120_000)):
        machine = replace(HOST, **values)
        for flavour in FLAVOURS:
            fixed = {"flavour": flavour, "steps": 2}
            found = _cases(SKIPPING, machine, turn=turn, fixed=fixed, checkpoint=MODES, memory=(True, False))
            yield from (replace(case, name=f"{name} {flavour} {case.name}") for case in found)
        plain = {"fixed": {"steps": 2}, "checkpoint": MODES, "schedule": (None, "gpipe")}
        found = _cases(CHAINS["chain-4x8"], machine, components=LABELS[:1], **plain)
        yield from (replace(case, name=f"{name} 4x8 {case.name}") for case in found)


def places() -> Iterator[Case]:
    """Devices that are shared or in another order, staged copies, no streams, no workers, links that are shared."""
    turn = count()
    shared = ((0, 1, 2, 3, 4), (0, 0, 1, 1, 2), (0, 1, 0, 1, 0), (4, 2, 3, 0, 1), (2, 5, 7, 4, 2), (0,) * 5)
    ways: dict[str, Any] = {"devices": shared, "transfer": ("direct", "host"), "workers": (True, False)}
    ways |= {"streams": (True, False), "flavour": FLAVOURS, "checkpoint": MODES}
    yield from _cases(SKIPPING, turn=turn, fixed={"steps": 2}, **ways)
    ways = {"devices": shared[:4], "transfer": ("direct", "host"), "tally": (True,), "checkpoint": MODES}
    yield from _cases(SKIPPING, turn=turn, **ways)
    for group in (1, 2, 3):
        bus = Wires(latency_ns=0, rate=2, group=group)
        found = _cases(SKIPPING, bus, turn=turn, checkpoint=MODES, flavour=FLAVOURS, transfer=("direct", "host"))
        yield from (replace(case, name=f"bus={group} {case.name}") for case in found)


def capacity() -> Iterator[Case]:
    """Devices that have to give segments back, kernels that go without scratch memory, and memory that runs out."""
    stages, turn = uneven(5, scratch=24 * MIB), count()
    work = with_skips(with_sizes(6, stages, rest=True), WAYS)
    for mib in (130, 160, 180, 200, 220, 240, 260, 280, 310, 340, 400, 500):
        ways: dict[str, Any] = {"checkpoint": MODES, "flavour": FLAVOURS, "schedule": (None, "gpipe")}
        machine = replace(HOST, capacity_bytes=mib * MIB)
        found = _cases(work, machine, turn=turn, fixed={"steps": 2}, **ways)
        yield from (replace(case, name=f"{mib} {case.name}") for case in found)
        shared = _cases(work, replace(HOST, capacity_bytes=2 * mib * MIB), turn=turn, checkpoint=MODES,
                        devices=((0, 0, 1, 1, 2),), transfer=("direct", "host"))  # fmt: skip
        yield from (replace(case, name=f"{2 * mib} {case.name}") for case in shared)


def large() -> Iterator[Case]:
    """More than a thousand tasks."""
    even, uneven_ = with_sizes(130, [stage(graph=3 * MIB)] * 8), with_sizes(70, uneven(16), rest=True)
    ahead = with_sizes(400, [stage(90, 9000, launches=5), *[stage(1, 1, launches=1)] * 2])
    works = {
        "8x130": (even, HOST),
        "16x70": (uneven_, Wires(queue_depth=0)),
        "16x70 skips": (with_skips(uneven_, [(1, 14), (2, 9), (3, 4)]), Wires(queue_depth=0)),
        "3x400 ahead": (ahead, Wires(latency_ns=1, rate=10**6, launch_ns=1, queue_depth=20)),
        "8x130 depth": (even, Wires(queue_depth=16)),
        "8x130 bus": (even, Wires(queue_depth=0, group=2, rate=2)),
    }
    for name, (work, machine) in works.items():
        found = _cases(work, machine, checkpoint=MODES, memory=(True, False), steps=(1, 2), components=LABELS[:1])
        yield from (replace(case, name=f"{name} {case.name}") for case in found)
        late = Components(early_recompute=False)
        yield Case(f"{name} late", work, machine, CaseSettings(late, "always", steps=2))
        yield Case(f"{name} tally", work, machine, CaseSettings(late, tally=True, steps=2))


GRIDS: Final[dict[str, Cases]] = {
    **{name: partial(chain, work) for name, work in CHAINS.items()},
    "skips-5x6": partial(chain, SKIPPING),
    "schedules": schedules,
    "steps": steps,
    "mechanisms": mechanisms,
    "queues": queues,
    "places": places,
    "capacity": capacity,
    "large": large,
}
"""The groups."""
