"""Repeats of one operation and their spread, within a budget of time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Final

_MIN_REPEATS: Final = 3
_MAX_REPEATS: Final = 20
_MIN_REPEAT_S: Final = 0.005
_MAX_CALLS: Final = 1000


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Least, median and greatest of one sample or more."""
    return {"min": min(samples), "median": median(samples), "max": max(samples)}


def repeated(
    run: Callable[[], object],
    synchronize: Callable[[], None],
    budget_s: float,
    *,
    host_only: bool = False,
    clock: Callable[[], float] = perf_counter,
) -> list[float]:
    """Seconds per call of ``run``, one value for each of 3 to 20 repeats.

    Two calls warm up. A repeat makes as many calls as fill 5 ms, then synchronises, so that queueing and the clock do
    not count. No repeat past the third starts after the budget is spent.

    Args:
        run: queues the operation.
        synchronize: waits until it has run.
        budget_s: seconds for everything.
        host_only: read the clock when the host has queued the operation, not when it has run. A repeat is then a
            single call, so that the queue never fills up and makes the host wait.
        clock: reads seconds.
    """
    end = clock() + budget_s

    def seconds(calls: int) -> float:
        synchronize()
        start = clock()
        for _ in range(calls):
            run()
        if not host_only:
            synchronize()
        return (clock() - start) / calls

    seconds(1)
    once = seconds(1)
    calls = 1 if host_only else _calls(once)
    samples: list[float] = []
    while len(samples) < _MIN_REPEATS or (len(samples) < _MAX_REPEATS and clock() < end):
        samples.append(seconds(calls))
    synchronize()
    return samples


def _calls(once_s: float) -> int:
    return max(1, min(_MAX_CALLS, round(_MIN_REPEAT_S / once_s))) if once_s > 0 else _MAX_CALLS
