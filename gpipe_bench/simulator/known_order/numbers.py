"""Sequence numbers of autograd's nodes without the nodes: those of :mod:`gpipe_bench.simulator.host.recording`."""

from __future__ import annotations

from collections.abc import Sequence

from gpipe_bench.schedule import clock_cycles
from gpipe_bench.simulator.workloads.workload import Workload

__all__ = ["Numbers"]


class Numbers:
    """The numbers that decide what a device's thread does first; lists have task (i,j) at i n + j.

    Args:
        workload: all of whose tasks learn; skips go through portals.
        arrivals: of each partition, how many copies and portals come into a task.
        again: how many micro-batches are checkpointed.
        early: whether recomputations have a node.

    Attributes:
        joins: of Join (i,j), which the thread of partition j-1 runs; -1 where there is none.
        arrivals: of the first of the copies and portals into a task; the others follow.
        recomputes: of recomputations; -1 where there is none.
        tasks: of the tasks themselves.
    """

    def __init__(self, workload: Workload, arrivals: Sequence[int], *, again: int, early: bool) -> None:
        m, n = workload.m, workload.n
        self.joins, self.arrivals, self.recomputes, self.tasks = ([-1] * (m * n) for _ in range(4))
        made, counters = m * n, [0] * n
        for cycle in clock_cycles(m, n):
            for i, j in cycle:
                place = i * n + j
                if i and j:
                    self.joins[place] = made
                self.arrivals[place] = made + (i > 0 < j)
                made += (i > 0 < j) + arrivals[j]
            for i, j in cycle:
                single = i < again or (not j and again > 0)
                counters[j] += 1 if single else workload.task(i, j).nodes
                self.tasks[i * n + j] = counters[j] - 1
                # A Wait, or on the first device the Join of what is one node.
                made += 1 if j else int(i > 0 and single)
            for i, j in cycle:
                # A Wait, a Recompute and a Fork.
                made += j + 1 < n
                if early and i < again:
                    self.recomputes[i * n + j] = made
                    made += 1
                made += i + 1 < m
