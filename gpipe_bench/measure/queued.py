"""Time of work on a device, whatever the host takes to queue it.

    device   ── sleep ──────────│ begin ── work ── work ── work ── end │
    host     begin, work, work, work, end │ waits

Work is queued while the device sleeps, so it runs without gaps, between two events of the device. If the device wakes
up before all is queued, the measurement does not count: the next one sleeps longer and queues less. A CPU, where one
only rehearses, is read by the clock.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Final

import torch

Run = Callable[[], object]

_CYCLES: Final = 10_000_000  # some milliseconds of today's GPUs
_TRIES: Final = 8
_FILL_S: Final = 0.002
_MOST_CALLS: Final = 50
_MS_PER_S: Final = 1e3


def device_seconds(run: Run, device: torch.device, repeats: int) -> list[float]:
    """Seconds that the device takes for a call of ``run``, once for each repeat.

    Args:
        run: queues the work.
        device: a CUDA device, or the CPU.
        repeats: how many values to give.
    """
    if device.type == "cpu":
        run()
        return [_host_seconds(run) for _ in range(repeats)]
    # Memory is allocated, and libraries choose their kernels; then a first time says how many calls are enough.
    run()
    once, _, cycles = _queued(run, device, 1, _CYCLES)
    wanted = max(1, min(_MOST_CALLS, round(_FILL_S / max(once, 1e-7))))
    found = []
    for _ in range(repeats):
        seconds, wanted, cycles = _queued(run, device, wanted, cycles)
        found.append(seconds)
    return found


def _queued(run: Run, device: torch.device, calls: int, cycles: int) -> tuple[float, int, int]:
    """Seconds per call, of as many calls and behind as long a sleep as it took."""
    for _ in range(_TRIES):
        milliseconds, behind = _between_events(run, device, calls, cycles)
        if behind:
            return milliseconds / _MS_PER_S / calls, calls, cycles
        calls, cycles = max(1, calls // 2), 2 * cycles
    raise RuntimeError(f"the device must sleep until all work is queued, got {cycles} cycles that did not suffice")


def _between_events(run: Run, device: torch.device, calls: int, cycles: int) -> tuple[float, bool]:
    """Milliseconds between the events, and whether the device slept until the last was queued."""
    begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    sleep: Any = torch.cuda._sleep  # noqa: SLF001 - PyTorch's own tests use it; it has no public name
    sleep(cycles)
    begin.record()
    for _ in range(calls):
        run()
    end.record()
    behind = not begin.query()
    torch.accelerator.synchronize(device)
    return begin.elapsed_time(end), behind


def _host_seconds(run: Run) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start
