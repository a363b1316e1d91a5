"""Seconds per step: every device is synchronised before each clock read, and nothing else is in a timed section."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from time import perf_counter

import torch

from gpipe_bench.measure.devices import distinct_accelerators
from gpipe_bench.settings import Steps, Warmup, checked


def synchronize(devices: Iterable[torch.device | str]) -> None:
    """Wait until every distinct accelerator among ``devices`` has finished its queued work; a CPU has none."""
    for device in distinct_accelerators(devices):
        torch.accelerator.synchronize(device)


def timed(step: Callable[[], object], devices: Iterable[torch.device | str], steps: int, warmup: int) -> list[float]:
    """Seconds of each of ``steps`` calls of ``step``, after ``warmup`` untimed ones.

    Args:
        step: one training step.
        devices: every device that the step uses; all of them are synchronised, not only the first (as torchgpipe's
            benchmarks did), before the clock is read at the start and at the end of a step.
        steps: timed calls.
        warmup: untimed calls before them.

    Raises:
        ValueError: ``steps`` < 1 or ``warmup`` < 0.
    """
    checked("steps", Steps, steps)
    checked("warmup", Warmup, warmup)
    accelerators = distinct_accelerators(devices)
    for _ in range(warmup):
        step()
    seconds = []
    for _ in range(steps):
        synchronize(accelerators)
        start = perf_counter()
        step()
        synchronize(accelerators)
        seconds.append(perf_counter() - start)
    return seconds
