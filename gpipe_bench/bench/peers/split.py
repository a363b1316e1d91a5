"""The limit of a step, and where the time between it and a measured step goes. Arithmetic only.

The limit is the plain micro-batch loop on one thread, cut into n partitions of equal time that wait for nothing but
each other: its step time times (m + n - 1) / (m n), and no less than its share of the cores or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Times = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True)
class Gap:
    """Seconds between the limit and a measured step; None: not measured. ``other`` is what is left of the gap.

    Attributes:
        imbalance: partitions of unequal time.
        contention: cores that are slower while others work.
        host: the contender's own work per cell.
        copies: transfers.
        other: the rest.
    """

    imbalance: float | None
    contention: float | None
    host: float | None
    copies: float | None
    other: float


def limit_s(plain_s: float, m: int, n: int, parallel: int) -> float:
    """Seconds of a step at the limit.

    Args:
        plain_s: of the plain loop.
        m: micro-batches.
        n: partitions.
        parallel: partitions that can compute at once.
    """
    return plain_s * max((m + n - 1) / (m * n), 1 / parallel)


def makespan(forward: Sequence[float], backward: Sequence[float], m: int) -> float:
    """Seconds of a step whose tasks wait for nothing but each other, all of them forward before any backward.

        partition 0   F0 F1 F2                   B2 B1 B0
        partition 1      F0 F1 F2       B2 B1 B0

    Args:
        forward: seconds of a micro-batch in each partition.
        backward: the same, recomputation included.
        m: micro-batches.
    """
    # Equal jobs through stations in a row: each passes all of them, and the slowest one lets out one at a time.
    return sum(sum(times) + (m - 1) * max(times) for times in (forward, backward))


def split_gap(
    gap_s: float,
    plain_s: float,
    m: int,
    *,
    alone: Times,
    contention_s: float | None,
    host_s: float | None,
    copies_s: float | None,
) -> Gap:
    """Where the time beyond the limit goes.

    Partition times are scaled so that all of them, one after the other, take as long as the plain loop.

    Args:
        gap_s: the contender's step less the limit's.
        plain_s: the plain loop's step.
        m: micro-batches.
        alone: forward and backward seconds of each partition, nothing else running.
        contention_s: what cores at work together add to the limit; None: not measured.
        host_s: of the contender.
        copies_s: of the contender.
    """
    forward, backward = alone
    n, serial = len(forward), m * (sum(forward) + sum(backward))
    scale = plain_s / serial
    even = makespan([sum(forward) / n] * n, [sum(backward) / n] * n, m)
    uneven = makespan(forward, backward, m)
    imbalance = scale * (uneven - even)
    known = sum(part for part in (imbalance, contention_s, host_s, copies_s) if part is not None)
    return Gap(imbalance, contention_s, host_s, copies_s, gap_s - known)
