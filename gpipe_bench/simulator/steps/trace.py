"""From a workload and a machine to the trace of training steps."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from math import log
from random import Random

from gpipe_bench.machine.replay import Machine
from gpipe_bench.schedules.program import Plan, run_forward
from gpipe_bench.simulator.steps.issue import Issuer
from gpipe_bench.simulator.steps.lanes import TraceLanes
from gpipe_bench.simulator.steps.layout import Layout
from gpipe_bench.simulator.steps.lists import run_lists
from gpipe_bench.simulator.steps.settings import Settings, check_devices, chosen_schedule
from gpipe_bench.simulator.steps.writer import CALLER, TraceWriter
from gpipe_bench.simulator.workloads.workload import Workload
from gpipe_bench.util.garbage import no_collection


# Nodes and tasks live until all rows are written, and the collector would go through them again and again.
@no_collection()
def step_rows(workload: Workload, machine: Machine, settings: Settings) -> tuple[TraceWriter, Layout, Workload]:
    """The rows of a training step, which a ``mark`` ends, where partitions are in it, and the workload placed there.

    Args:
        workload: as :meth:`Workload.chosen` gives it.
        machine: how long copies take.
        settings: of the run.

    Raises:
        ValueError: devices or a schedule do not fit the workload.
        ScheduleError: there is no such schedule.
    """
    m, n, components = workload.m, workload.n, settings.components
    schedule = None
    if settings.schedule is not None:
        schedule = chosen_schedule(settings.schedule, m, n, settings.devices)
        if schedule.splits and any(
            w.learns and w.split is None for works in workload.partitions for w in works.values()
        ):
            rule = "workload must be split into I and W, as the schedule is, got whole backward passes"
            raise ValueError(f"{rule}; build it with split=True")
    ranks = tuple(range(n)) if schedule is None else tuple(schedule.placement)
    devices = tuple(settings.devices) or ranks
    check_devices(ranks, devices)
    layout = Layout.of(devices, ranks, m, settings)
    if components.portals:
        workload = workload.placed([*zip(devices, ranks, strict=True)] if layout.staged else devices)
    writer = TraceWriter()
    issuer = Issuer(writer, workload, machine, settings, layout)
    plan = Plan[int](m, n, components, settings.checkpoint, dict(enumerate(issuer.incoming)))
    workers = settings.workers and components.clock_cycle and n > 1
    issuer.tell(CALLER, "begin")
    if schedule is None:
        lanes = TraceLanes(issuer, workers=workers)
        run_forward(plan, lanes)
        lanes.backward()
    else:
        run_lists(schedule, issuer, plan, workers=workers)
    issuer.update()
    writer.plain("mark", CALLER)
    return writer, layout, workload


def root_latencies(workload: Workload, settings: Settings) -> tuple[int, ...]:
    """Of the roots of all nested passes that there can be, in nanoseconds."""
    mean = settings.nesting_ns[1]
    checkpointed = Plan[int](workload.m, workload.n, checkpoint=settings.checkpoint).checkpointed
    if settings.seed is None or settings.flavour != "published" or not checkpointed:
        return (mean,)
    return tuple(islice(latencies(mean, settings.seed), settings.steps * workload.n * checkpointed))


def latencies(mean_ns: int, seed: int) -> Iterator[int]:
    """How long a sleeping host thread takes to wake: whole microseconds, exponentially distributed, without end.

    A thread that sleeps is woken through the scheduler of the operating system, by a core that may itself be asleep: a
    few microseconds as a rule, more than a hundred now and then. Where the order of work depends on it, a typical value
    would show one order only; the mean of many steps and their largest memory come from all of them.
    """
    numbers = Random(seed)  # noqa: S311 - a reproducible sequence is what is wanted, not a secret one
    while True:
        yield round(-mean_ns / 1000 * log(1 - numbers.random())) * 1000
