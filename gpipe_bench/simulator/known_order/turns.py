"""Whose turn comes first within one nanosecond.

The clock keeps an agenda: what is due at one time comes in the order in which it was entered. A host thread enters its
next turn when it has issued something; an operation enters its end when it starts, after the turns of that time; a
thread that waits for a start enters its next turn after that. So a turn is its time and its entry:

    entry = 2 t          entered at time t by a host thread         an operation that starts at t ends before turns
          = 2 t + 1      at time t, after a start                   of the same time whose entry is above 2 t
"""

from __future__ import annotations

import numpy as np

from gpipe_bench.simulator.known_order.step_times import Integers

__all__ = ["Unclear", "passed"]


class Unclear(Exception):  # noqa: N818 - not an error: another way has to be taken
    """Which of two turns comes first is not known."""


def passed(ends: Integers, entered: Integers, times: Integers, entries: Integers) -> Integers:
    """How many of the ends are over at each turn.

    Args:
        ends: of operations, or turns, rising.
        entered: their entries; of an operation twice its start.
        times: of turns.
        entries: of turns.
    """
    if not len(ends):
        return np.zeros_like(times)
    count: Integers = np.searchsorted(ends, times)
    last = np.minimum(count, len(ends) - 1)
    count += (count < len(ends)) & (ends[last] == times) & (entered[last] < entries)
    return count
