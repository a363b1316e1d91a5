"""Large runs: exact times from arrays, exact peaks of memory from what passes are known to do.

Times are those of :mod:`gpipe_bench.simulator.known_order.wavefront`, to the nanosecond those of the clock, and peaks
those of :mod:`gpipe_bench.simulator.memory_states.device_peaks`, to the byte. Where these cannot say which of two
requests of one nanosecond came first, or a device is full, the clock has to run, which takes too long for a very large
run. Then peaks are taken from two runs on the clock with fewer micro-batches and continued in a straight line, which is
exact for what tensors hold but for hosts that race, and not for reserved segments, which grow in leaps; a run says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Final

from gpipe_bench.simulator.host.settings import Settings
from gpipe_bench.simulator.known_order.grid import Grid
from gpipe_bench.simulator.known_order.step_times import Step
from gpipe_bench.simulator.known_order.tables import Tables
from gpipe_bench.simulator.known_order.turns import Unclear
from gpipe_bench.simulator.known_order.wavefront import Overtaken, Wavefront
from gpipe_bench.simulator.memory_states.device_peaks import DevicePeaks
from gpipe_bench.simulator.runs.outcome import Run
from gpipe_bench.simulator.virtual_time.places import POOL
from gpipe_bench.simulator.workloads.workload import Machine, Workload

__all__ = ["VERY_LARGE", "foreseeable", "run_large", "run_of", "with_peaks"]

_PEAKS: Final = ("peak_live_bytes", "peak_allocated_bytes", "peak_reserved_bytes")
VERY_LARGE: Final = 2**17
"""Tasks from which on the clock takes too long."""

_Whole = Callable[[Workload, Machine, Settings], Run]


def foreseeable(workload: Workload, machine: Machine, settings: Settings) -> bool:
    """Whether who issues what in which order is known beforehand.

    With clock-cycles, Fork and Join, today's autograd, copy streams and a device per partition it is, if all tasks run
    backward. Skips would share links with the micro-batches, and copies of many tensors could fill the launch queues of
    copy streams.
    """
    parts = settings.components
    devices = settings.devices or tuple(range(workload.n))
    plain = parts.clock_cycle and parts.fork_join and parts.copy_streams and settings.streams and workload.regular
    alone = len(set(devices)) == len(devices) == workload.n > 1 and settings.transfer == "direct"
    if not (plain and alone and settings.flavour == "current") or any(
        skip.source != skip.target for skip in workload.skips
    ):
        return False
    # Neighbours that share a bus would take turns on it.
    buses = [machine.bus(*way) for way in pairwise(devices)]
    if any(bus is not None and buses.count(bus) > 1 for bus in buses):
        return False
    tensors = max(len(work.input_bytes) for works in workload.partitions for work in works.values())
    rounds = -(-workload.m // POOL)
    return not machine.queue_depth or 2 * settings.steps * tensors * rounds <= machine.queue_depth


def run_large(workload: Workload, machine: Machine, settings: Settings, whole: _Whole) -> Run | None:
    """Simulate a large workload; None where only the clock can.

    Args:
        workload: what to run.
        machine: on what.
        settings: how.
        whole: runs a workload on the clock.
    """
    quick = settings.tally and workload.m * workload.n < VERY_LARGE
    if quick or not foreseeable(workload, machine, settings):
        return None
    devices = settings.devices or tuple(range(workload.n))
    tables = Tables(workload, machine, devices, settings.checkpoint)
    if not tables.steady():
        return None
    early = settings.components.early_recompute
    try:
        if settings.memory and tables.plain() and machine.launch_ns > 0:
            with suppress(Unclear):
                found = Wavefront(tables, machine, early=early, steps=settings.steps, turns=True)
                done = run_of(workload, devices, found.steps, found.makespan)
                return with_peaks(done, devices, DevicePeaks(workload, tables, found.steps), machine)
        if settings.memory and workload.m * workload.n < VERY_LARGE:
            return None
        found = Wavefront(tables, machine, early=early, steps=settings.steps)
    except Overtaken:
        return None
    done = run_of(workload, devices, found.steps, found.makespan)
    return _extrapolated(done, workload, machine, settings, whole) if settings.memory else done


def run_of(workload: Workload, devices: Sequence[int], steps: Sequence[Step], makespan: int) -> Run:
    """A run of which the times are known, without memory."""
    grid = Grid(workload, devices, steps)
    return Run(makespan, grid.ends_ns(), (), (), (), (), (), grid)


def with_peaks(done: Run, devices: Sequence[int], peaks: DevicePeaks, machine: Machine) -> Run | None:
    """A run with the peaks of all devices; None if one has to give segments back.

    Raises:
        Unclear: which of two requests came first is not known.
    """
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


def _extrapolated(done: Run, workload: Workload, machine: Machine, settings: Settings, whole: _Whole) -> Run | None:
    """Continue the peaks of two smaller runs; None if a device might have to give segments back."""
    m = workload.m
    if m < 3 * POOL:
        return None
    # Both leave the same remainder as m, so that streams are shared in the same way.
    few = POOL + m % POOL if m % POOL else POOL
    sizes = workload.microbatch_sizes
    runs = [
        whole(
            replace(workload, microbatch_sizes=sizes[m - count :]),
            machine,
            replace(settings, steps=1),
        )
        for count in (few, few + POOL)
    ]
    times = (m - few) // POOL
    live, allocated, reserved = (
        tuple(small + times * (more - small) for small, more in zip(*(getattr(one, name) for one in runs), strict=True))
        for name in _PEAKS
    )
    if machine.capacity_bytes and max(reserved) > machine.capacity_bytes:
        return None
    return replace(
        done,
        peak_live_bytes=live,
        peak_allocated_bytes=allocated,
        peak_reserved_bytes=reserved,
        flushes=runs[0].flushes,
        extrapolated=_PEAKS,
    )
