"""The order in which a pipeline issues its tasks.

The deterministic clock-cycle (torchgpipe, arXiv 2004.09910, section 3.1, algorithm 1), here m = 4, n = 3:

    k   partition 0   partition 1   partition 2
    0      (0,0)
    1      (1,0)         (0,1)
    2      (2,0)         (1,1)         (0,2)
    3      (3,0)         (2,1)         (1,2)
    4                    (3,1)         (2,2)
    5                                  (3,2)

A task is ``(i, j)``: micro-batch i on partition j. Tasks of one cycle do not depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpipe_bench.settings import CHECKPOINT_MODES

__all__ = ["CHECKPOINT_MODES", "Cycle", "Task", "checkpoint_stop", "clock_cycles", "ideal_bubble", "microbatch_major"]

Task = tuple[int, int]
Cycle = list[Task]


def clock_cycles(m: int, n: int) -> Iterator[Cycle]:
    """The tasks of each clock-cycle: m + n - 1 cycles of at most min(m, n) tasks, partitions ascending.

    Args:
        m: micro-batches.
        n: partitions.
    """
    for k in range(m + n - 1 if m and n else 0):
        yield [(k - j, j) for j in range(max(1 + k - m, 0), min(1 + k, n))]


def microbatch_major(m: int, n: int) -> Iterator[Cycle]:
    """The natural order without clock-cycles: each micro-batch through all partitions, one task at a time."""
    for i in range(m):
        for j in range(n):
            yield [(i, j)]


def checkpoint_stop(checkpoint: str, m: int) -> int:
    """How many leading micro-batches are checkpointed; m counts actual micro-batches, not ``chunks``.

    Args:
        checkpoint: ``always``, ``except_last`` or ``never`` (GPipe, arXiv 1811.06965, section 2.3).
        m: actual micro-batches.
    """
    return {"always": m, "except_last": max(m - 1, 0), "never": 0}[checkpoint]


def ideal_bubble(m: int, n: int) -> float:
    """The idle share of a balanced pipeline with free copies, (n-1)/(m+n-1) (GPipe, section 2.3)."""
    return (n - 1) / (m + n - 1)
