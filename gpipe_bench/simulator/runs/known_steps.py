"""Runs whose order of issue is known, as arrays: times of :mod:`gpipe_bench.simulator.known_order.host_threads`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

import numpy as np

from gpipe_bench.collection import no_collection
from gpipe_bench.errors import OutOfMemory
from gpipe_bench.schedule import checkpoint_stop
from gpipe_bench.simulator.host.settings import Settings
from gpipe_bench.simulator.known_order.grid import Grid
from gpipe_bench.simulator.known_order.host_threads import Flushed, KnownOrder
from gpipe_bench.simulator.known_order.operations import Disorder
from gpipe_bench.simulator.known_order.step_times import Integers, Step
from gpipe_bench.simulator.known_order.turns import Unclear
from gpipe_bench.simulator.memory_states.device_peaks import DevicePeaks
from gpipe_bench.simulator.runs.outcome import Run
from gpipe_bench.simulator.virtual_time.places import POOL
from gpipe_bench.simulator.workloads.workload import Machine, TaskWork, Workload

__all__ = ["is_known", "run_known", "steps_of"]


def is_known(workload: Workload, machine: Machine, settings: Settings) -> bool:
    """Whether who issues what in which order is known beforehand.

    With clock-cycles, Fork and Join, today's autograd, copy streams and a device per partition it is, if all tasks run
    backward, everything takes time on host and device, and no copy stream's launch queue can be full.
    """
    parts, devices = settings.components, settings.devices or tuple(range(workload.n))
    crossing = [skip for skip in workload.skips if skip.source != skip.target]
    plain = parts.clock_cycle and parts.fork_join and parts.copy_streams and workload.regular
    alone = len(set(devices)) == len(devices) == workload.n > 1 and settings.transfer == "direct"
    usual = settings.flavour == "current" and settings.backward == "autograd" and not settings.left_out
    usual = usual and settings.streams and settings.workers
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
    devices = settings.devices or tuple(range(workload.n))
    with no_collection():
        if settings.memory and not settings.tally:
            with suppress(Unclear):
                return _by_states(workload, machine, settings, devices)
        try:
            known = _in_any_order(workload, machine, settings)
        except (Flushed, OutOfMemory):
            return None
        done = _run_of(workload, devices, steps_of(known, workload.m, workload.n), known.makespan)
        memory = [] if known.memory is None else known.memory.devices
        known.forget()
    return replace(
        done,
        peak_live_bytes=tuple(device.peak_live for device in memory),
        peak_allocated_bytes=tuple(device.peak_allocated for device in memory),
        peak_reserved_bytes=tuple(device.peak_reserved for device in memory),
        flushes=tuple(device.flushes for device in memory),
    )


def _by_states(workload: Workload, machine: Machine, settings: Settings, devices: Sequence[int]) -> Run | None:
    """Memory apart from time: what passes do to free memory is looked up.

    Raises:
        Unclear: tensors live otherwise, or come back in another order.
    """
    DevicePeaks.check(workload)
    if workload.m == 1:
        raise Unclear
    known = _in_any_order(workload, machine, replace(settings, memory=False))
    steps = steps_of(known, workload.m, workload.n)
    done = _run_of(workload, devices, steps, known.makespan)
    known.forget()
    checkpoints = np.arange(workload.m) < checkpoint_stop(settings.checkpoint, workload.m)
    return _with_peaks(done, devices, DevicePeaks(workload, checkpoints, steps), machine)


def _in_any_order(workload: Workload, machine: Machine, settings: Settings) -> KnownOrder:
    if not any(skip.source != skip.target for skip in workload.skips):
        try:
            return KnownOrder(workload, machine, settings)
        except Disorder:
            pass
    # Portals hold up copies of the streams that they use, and those come in another order.
    return KnownOrder(workload, machine, settings, in_order=False)


def _run_of(workload: Workload, devices: Sequence[int], steps: Sequence[Step], makespan: int) -> Run:
    """A run of which the times are known, without memory."""
    grid = Grid(workload, devices, steps)
    return Run(makespan, grid.ends_ns(), (), (), (), (), (), grid)


def _with_peaks(done: Run, devices: Sequence[int], peaks: DevicePeaks, machine: Machine) -> Run | None:
    """A run with the peaks of all devices; None if one has to give segments back."""
    of: dict[int, tuple[int, int, int]] = {}
    for j, device in enumerate(devices):
        of[device] = peaks.of(j)
        if machine.capacity_bytes and of[device][-1] > machine.capacity_bytes:
            return None
    peaks.forget()
    live, allocated, reserved = zip(*(of.get(device, (0, 0, 0)) for device in range(max(devices) + 1)), strict=True)
    return replace(
        done,
        peak_live_bytes=live,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        flushes=(0,) * len(reserved),
    )


def steps_of(known: KnownOrder, m: int, n: int) -> list[Step]:
    """The times of each step as arrays."""
    operations, agenda = known.agenda.operations, known.agenda
    # The last of each: where there is no operation.
    found = agenda.issues, operations.starts, operations.ends, agenda.entries
    columns = [np.append(np.array(of, dtype=np.int64), -1) for of in found]
    columns.append(np.arange(len(columns[0])))
    columns[-1][-1] = -1
    i, j = np.divmod(np.arange(m * n), n)
    places = (i + j) * n + j, (m - 1 - i + n - 1 - j) * n + j
    steps = []
    for tasks, held, (loss, update) in zip(known.steps, known.held, known.instants, strict=True):
        step = Step()
        for kind, numbers in tasks.items():
            place = places[kind.partition(" ")[0] not in {"forward", "copy", "portal"}]
            which = np.array(numbers)
            for table, column in zip(
                (step.issue, step.start, step.end, step.entries, step.numbers), columns, strict=True
            ):
                table[kind] = _placed(column[which], place, (m + n - 1, n), -1)
        step.loss, step.update = loss[0], update
        for of_stream, tables in zip(held, (step.used, step.shared), strict=True):
            tables.extend(_placed(edge, places[1], (m + n - 1, n), 0) for edge in _last(of_stream, columns))
        steps.append(step)
    return steps


def _placed(values: Integers, places: Integers, shape: tuple[int, int], nothing: int) -> Integers:
    table = np.full(shape, nothing, dtype=np.int64)
    table.reshape(-1)[places] = values
    return table


def _last(held: Sequence[tuple[int, ...]], columns: Sequence[Integers]) -> tuple[Integers, Integers]:
    """When the last of some operations ended, and its entry."""
    counts = np.fromiter(map(len, held), dtype=np.int64, count=len(held))
    which = np.fromiter(chain.from_iterable(held), dtype=np.int64)
    begin = np.cumsum(counts) - counts
    ends, starts = columns[2][which], columns[1][which]
    last = np.maximum.reduceat(ends, begin)
    latest = np.where(ends == np.repeat(last, counts), starts, -1)
    return last, 2 * np.maximum.reduceat(latest, begin)
