"""Runs whose order of issue is known, as arrays: the times of :class:`gpipe_bench.simulator.known_order.KnownOrder`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.collection import no_collection
from gpipe_bench.simulator.grid import Grid
from gpipe_bench.simulator.known_operations import Disorder
from gpipe_bench.simulator.known_order import Flushed, KnownOrder, Task
from gpipe_bench.simulator.outcome import Run, Settings
from gpipe_bench.simulator.places import POOL
from gpipe_bench.simulator.tables import Integers
from gpipe_bench.simulator.wavefront import Step
from gpipe_bench.simulator.workload import Machine, TaskWork, Workload

__all__ = ["is_known", "run_known", "steps_of"]


def is_known(workload: Workload, machine: Machine, settings: Settings) -> bool:
    """Whether who issues what in which order is known beforehand.

    With clock-cycles, Fork and Join, today's autograd, copy streams and a device per partition it is, if everything
    takes time on host and device, and no copy stream's launch queue can be full.
    """
    parts, devices = settings.components, settings.devices or tuple(range(workload.n))
    crossing = [skip for skip in workload.skips if skip.source != skip.target]
    plain = parts.clock_cycle and parts.fork_join and parts.copy_streams and settings.streams
    alone = len(set(devices)) == len(devices) == workload.n > 1 and settings.transfer == "direct"
    usual = settings.flavour == "current" and settings.backward == "autograd" and not settings.left_out
    if not (plain and alone and usual) or (crossing and not parts.portals) or machine.launch_ns <= 0:
        return False
    works = [work for works in workload.partitions for work in works.values()]
    tasks = [kernels for work in works for kernels in (work.forward, work.recompute, work.backward)]
    others = [workload.loss, *workload.optimizer]
    if not all(one.duration_ns > 0 < one.launches for one in tasks) or not all(
        (one.duration_ns > 0) == (one.launches > 0) for one in others
    ):
        return False
    copies = {(devices[j - 1], devices[j], work.input_bytes) for j, work in _arriving(workload)}
    copies |= {(devices[one.source], devices[one.target], (size,)) for one in crossing for size in one.bytes.values()}
    for source, target, sizes in copies:
        ways = (source, target), (target, source)
        if any(sum(machine.copy_ns(*way, nbytes) for nbytes in sizes) <= 0 for way in ways):
            return False
    tensors = max(len(sizes) for _, _, sizes in copies) + len(crossing)
    rounds = -(-workload.m // POOL)
    return not machine.queue_depth or 2 * settings.steps * tensors * rounds <= machine.queue_depth


def _arriving(workload: Workload) -> Iterator[tuple[int, TaskWork]]:
    """Partitions into which something is copied, and their tasks."""
    return ((j, work) for j in range(1, workload.n) for work in workload.partitions[j].values())


def run_known(workload: Workload, machine: Machine, settings: Settings) -> Run | None:
    """Run a workload; None where a device is full, so that its threads wait for it."""
    with no_collection():
        try:
            done = _in_any_order(workload, machine, settings)
        except (Flushed, OutOfMemory):
            return None
        grid = Grid(workload, settings.devices or tuple(range(workload.n)), steps_of(done, workload.m, workload.n))
        devices = [] if done.memory is None else done.memory.devices
        live, allocated, reserved, flushes = (
            tuple(getattr(device, name) for device in devices)
            for name in ("peak_live", "peak_allocated", "peak_reserved", "flushes")
        )
        makespan = done.makespan
        done.forget()
    return Run(makespan, grid.ends_ns(), (), live, allocated, reserved, flushes, grid)


def _in_any_order(workload: Workload, machine: Machine, settings: Settings) -> KnownOrder:
    if not any(skip.source != skip.target for skip in workload.skips):
        try:
            return KnownOrder(workload, machine, settings)
        except Disorder:
            pass
    # Portals hold up copies of the streams that they use, and those come in another order.
    return KnownOrder(workload, machine, settings, in_order=False)


def steps_of(done: KnownOrder, m: int, n: int) -> list[Step]:
    """The times of each step as arrays, see :class:`gpipe_bench.simulator.wavefront.Step`."""
    operations = done.agenda.operations
    columns = [np.array(column) for column in (done.agenda.issues, operations.starts, operations.ends)]
    return [_step(tasks, columns, m, n) for tasks in done.steps]


def _step(tasks: dict[str, list[Task]], columns: Sequence[Integers], m: int, n: int) -> Step:
    step = Step()
    for kind, rows in tasks.items():
        numbers, i, j = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        forward = kind.partition(" ")[0] in {"forward", "copy", "portal"}
        k = i + j if forward else m - 1 - i + n - 1 - j
        for table, column in zip((step.issue, step.start, step.end), columns, strict=True):
            table[kind] = np.full((m + n - 1, n), -1, dtype=np.int64)
            table[kind][k, j] = column[numbers]
    return step
