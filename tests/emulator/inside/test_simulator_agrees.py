"""The simulator against the real engine on virtual devices: with the same durations, the same times and orders.


Both know the same of the hardware: a forward pass or recomputation takes 10 ms, a backward pass 20, a copy 0.1. What
differs is that here real threads issue everything. Which node of autograd a thread runs next is decided in virtual
time, so that a run does not depend on how fast its host was.

Where Fork and Join order the backward pass the host costs nothing. Without them, and with copies on compute streams,
the order depends on when threads issue what. There a launch takes 1 µs, so that few things happen at one time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.emulator.handovers import seen
from gpipe_bench.emulator.recording import TaskRows, name_tasks, recording
from gpipe_bench.machine.replay import Replay
from gpipe_bench.results.timeline import COMPUTE_KINDS, TimelineEvent
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.workload import Kernels, TaskWork
from gpipe_bench.skip import Namespace
from gpipe_bench.step.timeline import Timeline
from tests.cover import cover
from tests.emulator.bed.behaviour import jitter
from tests.emulator.bed.rows import Bed
from tests.emulator.inside.pipelines import (
    BACKWARD_MS,
    COPY_MS,
    FORWARD_MS,
    WIDTH,
    Work,
    working_pipe,
)
from tests.engine.support import Pop, Stash
from tests.simulator.support import MS, workload

MACHINE, WITH_HOST_TIME = Bed(COPY_MS), Bed(COPY_MS, launch_ns=1000)
SIZES = ((1, 3), (3, 2), (4, 4), (8, 3))
RUNS = 3

# Of a pipeline of n partitions: (partition that stashes, partition that pops).
SKIPS = {2: ((0, 1),), 3: ((0, 2), (1, 2)), 4: ((0, 3), (1, 2), (1, 3))}

Orders = tuple[tuple[tuple[str, int], ...], ...]
Skips = tuple[tuple[int, int], ...]


def skipping_pipe(m: int, n: int, skips: Skips, **options) -> GPipe:
    """A chain like :func:`working_pipe`; partitions stash what they give, and pop before they work."""
    members = [[Work()] for _ in range(n)]
    for source, target in skips:
        namespace = Namespace()
        members[source].append(Stash(namespace))
        members[target].insert(0, Pop(namespace))
    layers = nn.Sequential(*(layer for member in members for layer in member))
    devices = [f"virtual:{j}" for j in range(n)]
    return GPipe(layers, [len(member) for member in members], devices=devices, chunks=m, **options)


def orders(events: Iterable[TimelineEvent], n: int) -> Orders:
    """The computations of each partition, in the order of their starts."""
    ran = [event for event in events if event.kind in COMPUTE_KINDS]
    return tuple(tuple((event.kind, event.microbatch) for event in ran if event.partition == j) for j in range(n))


def real(m: int, n: int, seeds: Iterable[int], skips: Skips = (), **options) -> list[tuple[float, Orders]]:
    """Makespan of the engine, and the order on each device, for each seed."""
    return [(length, orders(events, n)) for length, events in emulated(m, n, seeds, skips, **options)]


def emulated(
    m: int, n: int, seeds: Iterable[int], skips: Skips = (), machine: Bed = MACHINE, **options
) -> Iterator[tuple[float, list[TimelineEvent]]]:
    """Makespan and events of the engine in a step for each seed, after a first one, which makes the gradients."""
    with seen():
        pipe = skipping_pipe(m, n, skips, **options) if skips else working_pipe(n, m, **options)
        x = torch.ones(m, WIDTH, device=pipe.devices[0])
        pipe(x).sum().backward()
        for seed in seeds:
            tasks = TaskRows()
            with jitter(seed, 200 if seed else 0), recording() as trace, pipe.observe(tasks):
                pipe(x).sum().backward()
            ran = Replay(trace, machine)
            ran.run()
            name_tasks(tasks.tasks, ran.rows())
            yield ran.rows().makespan_ns / MS, [*Timeline(trace.tasks, ran.tasks(), range(len(trace.tasks)))]


def task(nodes: int) -> TaskWork:
    """:class:`Work` with its launches."""
    forward, again, backward = round(FORWARD_MS * MS), round(FORWARD_MS * MS), round(BACKWARD_MS * MS)
    kernels = Kernels(forward, 2), Kernels(again, 1), Kernels(backward, 3)
    return TaskWork(*kernels, input_bytes=(1,), output_bytes=(1,), nodes=nodes)


def simulated(
    m: int, n: int, skips: Skips = (), machine: Bed = MACHINE, *, components, checkpoint, transfer, schedule=None
) -> tuple[float, Orders]:
    # A stash makes one node, and so does a pop; an observer's marks are two more.
    work = workload(m, [task(3 + sum(j in skip for skip in skips)) for j in range(n)], skips)
    chosen = Settings(components, checkpoint, transfer=transfer, memory=False, schedule=schedule)
    found = run(work, machine, chosen)
    return found.makespan_ns / MS, orders(found.events, n)


EVERY = list(Components.factorial())
# Where no skip crosses a boundary portals make no difference.
ALL = [one for one in EVERY if one.portals]
ORDERED = [one for one in EVERY if one.fork_join and one.copy_streams]
ON_COMPUTE_STREAMS = [one for one in EVERY if one.fork_join and not one.copy_streams]
RACING = [one for one in ALL if not (one.fork_join and one.copy_streams)]


def name(value: object) -> str:
    return value.label if isinstance(value, Components) else str(value)


def cases(components: Iterable[Components], sizes: Iterable[tuple[int, int]], skipping: Iterable[bool] = (False,)):
    """Any two of: components, checkpoint and transfer, as options; (m, n); and whether there are skips."""
    found = []
    for *chosen, (m, n), skips in cover(product(components, CHECKPOINT_MODES, ("direct", "host"), sizes, skipping)):
        options = dict(zip(("components", "checkpoint", "transfer"), chosen, strict=True))
        chosen_skips = SKIPS[n] if skips else ()
        found.append(pytest.param(options, m, n, chosen_skips, id="-".join(map(name, (*chosen, m, n, skips)))))
    return pytest.mark.parametrize(("options", "m", "n", "skips"), found)


@cases([one for one in ORDERED if one.portals], SIZES)
def test_makespan_and_order_are_those_of_the_engine(options, m, n, skips):
    assert real(m, n, range(RUNS), skips, **options) == [simulated(m, n, skips, **options)] * RUNS


@cases([one for one in ON_COMPUTE_STREAMS if one.portals], SIZES[1:3])
def test_copies_on_compute_streams_change_no_order_of_tasks(options, m, n, skips):
    expected = simulated(m, n, skips, **options)[1]
    assert [order for _, order in real(m, n, range(RUNS), skips, **options)] == [expected] * RUNS


@cases(ORDERED, SIZES[1:], [True])
def test_makespan_and_order_with_skips(options, m, n, skips):
    """Skips that set out at one time with the micro-batch take turns with it, in an order that threads race for."""
    length, order = simulated(m, n, skips, **options)
    ((expected, expected_order),) = real(m, n, [1], skips, **options)
    assert order == expected_order
    assert length == pytest.approx(expected, abs=len(skips) * COPY_MS + 1e-6)


@cases(ON_COMPUTE_STREAMS, SIZES[1:3], [True])
def test_skips_on_compute_streams_change_no_order_of_tasks(options, m, n, skips):
    ((_, expected),) = real(m, n, [1], skips, **options)
    assert simulated(m, n, skips, **options)[1] == expected


@cases(ORDERED, SIZES[1:3], [False, True])
def test_a_backward_pass_with_a_schedule_takes_as_long_and_keeps_its_order(options, m, n, skips):
    length, order = simulated(m, n, skips, **options, schedule="gpipe")
    ((expected, expected_order),) = real(m, n, [1], skips, **options, schedule="gpipe")
    assert order == expected_order
    assert length == pytest.approx(expected, abs=len(skips) * COPY_MS + 1e-6)


@cases(RACING, SIZES[1:3])
def test_where_the_order_depends_on_host_time_it_is_that_of_the_engine(options, m, n, skips):
    components, checkpoint, transfer = options.values()
    # A known disagreement: there the simulator is one recomputation slower.
    late = FORWARD_MS if (components.label, checkpoint, transfer) == ("x-x-ptl", "always", "host") else 0
    length, order = simulated(m, n, skips, WITH_HOST_TIME, **options)
    ((expected, expected_order),) = real(m, n, [1], skips, machine=WITH_HOST_TIME, **options)
    assert order == expected_order
    # Two copies that set out at one time go in either order.
    assert length == pytest.approx(expected, abs=2 * COPY_MS + 0.01 + late)


@pytest.mark.parametrize(
    ("components", "checkpoint", "size"), cover(product(RACING, CHECKPOINT_MODES, SIZES[1:])), ids=name
)
def test_a_run_does_not_depend_on_how_fast_its_host_was(components, checkpoint, size):
    options = {"components": components, "checkpoint": checkpoint, "transfer": "direct", "machine": WITH_HOST_TIME}
    first, *others = emulated(*size, range(RUNS), **options)
    assert others == [first] * (RUNS - 1)
