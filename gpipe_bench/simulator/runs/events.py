"""The event simulation: one order of actions, one clock.

    program, or schedule ──> rows ──> nodes of autograd's graph, and lists of actions of host threads
                                         │
    calling thread, workers, autograd threads issue ──> streams and engines of the clock
                                         │
                                    allocators

Everything is integers, so results are the same on every machine.
"""

from __future__ import annotations

from gpipe_bench.schedule import checkpoint_stop
from gpipe_bench.simulator.clock.run import run_on_clock
from gpipe_bench.simulator.clock.settings import Settings
from gpipe_bench.simulator.runs.outcome import Run
from gpipe_bench.simulator.workloads.workload import Machine, Workload

__all__ = ["Run", "Settings", "run"]


def run(workload: Workload, machine: Machine, settings: Settings | None = None) -> Run:
    """Simulate training steps.

    Raises:
        ValueError: devices or a schedule do not fit the workload.
        ScheduleError: there is no such schedule.
        OutOfMemory: a device's capacity does not suffice.
    """
    chosen = settings or Settings()
    done = run_on_clock(workload.chosen(checkpoint_stop(chosen.checkpoint, workload.m)), machine, chosen)
    return Run(
        makespan_ns=done.result.makespan_ns,
        step_ends_ns=done.step_ends_ns,
        issued=done.tasks,
        peak_live_bytes=tuple(device.peak_live for device in done.memory),
        peak_allocated_bytes=tuple(device.peak_allocated for device in done.memory),
        peak_reserved_bytes=tuple(device.peak_reserved for device in done.memory),
        flushes=tuple(device.flushes for device in done.memory),
        devices=done.devices,
    )
