"""How long a sleeping host thread takes to wake: the one thing here that varies, and on every run in the same way.

A thread that sleeps is woken through the scheduler of the operating system, by a core that may itself be asleep: a few
microseconds as a rule, more than a hundred now and then. Where the order of work depends on it, a typical value would
show one order only; the mean of many steps and their largest memory come from all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import log
from random import Random


def latencies(mean_ns: int, seed: int) -> Iterator[int]:
    """Exponentially distributed latencies of that mean without end, in whole microseconds."""
    numbers = Random(seed)  # noqa: S311 - a reproducible sequence is what is wanted, not a secret one
    while True:
        yield round(-mean_ns / 1000 * log(1 - numbers.random())) * 1000
