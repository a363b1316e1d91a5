"""GPipe: all forward passes, then all backward passes (Huang et al., arXiv 1811.06965, section 2.3)."""

from __future__ import annotations

from gpipe_bench.schedules.actions import Action, Schedule

__all__ = ["gpipe"]


def gpipe(m: int, n: int) -> Schedule:
    """GPipe's schedule: each device keeps the activations of all m micro-batches.

    With m = 4 and n = 3, where numbers are micro-batches:

        device 0  F0 F1 F2 F3                   B3    B2    B1    B0
        device 1     F0 F1 F2 F3          B3    B2    B1    B0
        device 2        F0 F1 F2 F3 B3    B2    B1    B0

    The backward pass takes the micro-batches in reverse, as torchgpipe does (Kim et al., arXiv 2004.09910).

    Args:
        m: micro-batches.
        n: partitions, one on each device.
    """
    forward = [[Action("F", i, j) for i in range(m)] for j in range(n)]
    backward = [[Action("B", i, j) for i in reversed(range(m))] for j in range(n)]
    return Schedule(tuple((*f, *b) for f, b in zip(forward, backward, strict=True)))
