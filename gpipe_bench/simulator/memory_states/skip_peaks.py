"""Exact peaks of memory of the device of a partition that skips begin or end at.

As in :mod:`gpipe_bench.simulator.memory_states.device_peaks`, with more copies, of which only their numbers say in
which order they come:

    forward    i ascending     portals and copy of (i, j) come, what left (i', j) goes, F(i,j)
    backward   i descending    gradients for (i', j) come     among R(i,j), B(i,j), gradients of (i, j) go
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from gpipe_bench.simulator.known_order.step_times import Flags, Integers
from gpipe_bench.simulator.memory_states.device_times import DeviceTimes
from gpipe_bench.simulator.memory_states.skip_slots import WITH_BACKWARD, WITH_FORWARD, Slots
from gpipe_bench.simulator.memory_states.skip_states import SkipHomeStates
from gpipe_bench.simulator.memory_states.skip_times import Copy

__all__ = ["skip_peaks"]

_Rows = tuple[Integers, NDArray[np.int64], NDArray[np.int64]]
"""Of some requests of a step their numbers, and by how much bytes in use change and grow on the way, (requests, 2)."""


def skip_peaks(
    home: SkipHomeStates, passes: Integers, slots: Slots, own: DeviceTimes, again: Flags
) -> tuple[int, int, int]:
    """Peaks of live, allocated and reserved bytes of one device.

    Args:
        home: its compute stream.
        passes: of all steps, by number.
        slots: its copy streams.
        own: times of its partition.
        again: (m,) whether each micro-batch is recomputed.
    """
    more = [copy for back in (False, True) for copy in slots.lives.senders(back=back)[1:]]
    rows, reserved = home.run(home.codes(passes, own.back(more)))
    base = np.array(home.base)
    peak = base
    rows = rows.reshape(slots.times.count, -1, rows.shape[1])
    for step in range(slots.times.count):
        numbers, changes, growths = map(np.concatenate, zip(*_requests(rows[step], slots, again, step), strict=True))
        order = np.argsort(numbers)
        change, growth = changes[order], growths[order]
        after = base + np.cumsum(change, axis=0)
        peak = np.maximum(peak, (after - change + growth).max(axis=0))
        base = after[-1]
    return int(peak[1]), int(peak[0]), reserved + slots.reserved


def _requests(rows: Integers, slots: Slots, again: Flags, step: int) -> Iterator[_Rows]:
    """All requests of a step; ``rows``: what passes do."""
    lives, times = slots.lives, slots.times
    m, j = len(again), lives.j
    used, grown = rows[:, [0, 2]], rows[:, [1, 3]]
    for place, one in enumerate(slots.arrivals):
        came = slots.came[place, step]
        yield times.numbers(one.copy)[step] * 2 - 1, came, came
    # Places of the passes; the loss is between.
    begin = len(rows) - 1 - m - int(again.sum())
    backward = (begin - 1 + np.cumsum(1 + again[::-1]))[::-1]
    recompute = backward[again] - 1
    yield times.numbers(Copy("recompute", j))[step, again] * 2, used[recompute], grown[recompute]
    last = 0
    for back, which, way in ((False, slice(m), WITH_FORWARD), (True, backward, WITH_BACKWARD)):
        numbers = times.numbers(Copy("backward" if back else "forward", j))[step] * 2
        gone = slots.gone.get(way)
        yield numbers, used[which] - (0 if gone is None else gone[step]), grown[which]
        for sender, copy in enumerate(lives.senders(back=back)):
            sent = rows[which, 4 + 2 * sender : 6 + 2 * sender].copy()
            if (back, sender) in slots.gone:
                sent += slots.gone[back, sender][step]
            numbers = times.numbers(copy)[step] * 2
            last = max(last, int(numbers.max()))
            yield numbers, -sent, np.zeros_like(sent)
        last = max(last, int(numbers.max()))
        end = slice(m, begin) if not back else slice(len(rows) - 1, None)
        yield np.full(len(used[end]), last + 1), used[end], grown[end]
