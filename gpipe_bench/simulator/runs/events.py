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
from gpipe_bench.simulator.clock.outcome import Run
from gpipe_bench.simulator.clock.run import run_on_clock
from gpipe_bench.simulator.clock.settings import Settings
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
    return run_on_clock(workload.chosen(checkpoint_stop(chosen.checkpoint, workload.m)), machine, chosen)
