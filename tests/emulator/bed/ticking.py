"""Timing events of PyTorch read the virtual clock: ``torch.Event.elapsed_time`` asks for a replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gpipe_bench.emulator.library import ELAPSED, backend
from gpipe_bench.emulator.recording import recording
from gpipe_bench.machine.replay import Machine, Replayed, replay
from gpipe_bench.machine.trace import Trace
from tests.emulator.bed.rows import passed_ns

__all__ = ["ticking"]

_NS_PER_MS: Final = 1_000_000


@contextmanager
def ticking(machine: Machine, *, host_time: bool = True) -> Iterator[Trace]:
    """Record the block; events that were recorded in it can be timed in it.

    Args:
        machine: what copies and launches cost.
        host_time: as for :func:`gpipe_bench.machine.replay.replay`.
    """
    with recording() as trace:
        latest: dict[int, Replayed] = {}

        @ELAPSED
        def elapsed(one: int, other: int) -> float:
            trace.fetch()
            count = len(trace.rows)
            if count not in latest:
                latest.clear()
                latest[count] = replay(trace, machine, host_time=host_time)
            passed = passed_ns(latest[count])
            return (passed[other] - passed[one]) / _NS_PER_MS

        backend().vd_set_elapsed(elapsed)
        try:
            yield trace
        finally:
            backend().vd_set_elapsed(ELAPSED())
