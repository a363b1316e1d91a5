"""The backward pass of ``backward='scheduled'``: each partition's worker runs its own tasks, in reversed order.

    recompute   compute (i, j) once more                          if checkpointed  early_recompute
    await       until (i, j + 1) has sent its gradients
    backward    recompute if that is still to be done, and run backward
    send        gradients to partition j - 1, and of skips to where they came from

No node stands between the tasks, so there is no autograd to model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gpipe_bench.program import Plan
from tests.simulator.oracle.host import Host
from tests.simulator.oracle.places import Places
from tests.simulator.oracle.recording import RecordingLanes
from tests.simulator.oracle.streams import Thread

__all__ = ["ScheduledBackward"]


class ScheduledBackward:
    """Runs the tasks of a batch backward.

    Args:
        plan: of its forward pass.
        lanes: what the forward pass left.
        host: issues what steps do.
        places: devices and streams.
        caller: the thread that runs the backward pass, and goes on when the last task is over.
    """

    def __init__(self, plan: Plan[Any], lanes: RecordingLanes, host: Host, places: Places, caller: Thread) -> None:
        self._plan, self._lanes, self._host, self._places, self._caller = plan, lanes, host, places, caller
        self._clock = host.clock
        # Gradients sent to each partition and not yet taken, and who waits for some.
        self._sent: Counter[int] = Counter()
        self._waiting: dict[int, Thread] = {}
        self._running = 0

    def run(self, *, workers: bool) -> Iterator[int | None]:
        """Run all tasks, in this thread or in ``workers``."""
        order = [task for cycle in self._plan.cycles() for task in cycle][::-1]
        if not workers:
            yield from self._tasks(order)
            return
        threads = sorted(set(self._places.workers))
        self._running = len(threads)
        for number in threads:
            self._clock.resume(self._work([task for task in order if self._places.workers[task[1]] == number]))
        yield None

    def _work(self, tasks: list[tuple[int, int]]) -> Thread:
        yield from self._tasks(tasks)
        self._running -= 1
        if not self._running:
            self._clock.resume(self._caller)

    def _tasks(self, tasks: list[tuple[int, int]]) -> Iterator[int | None]:
        plan = self._plan
        for i, j in tasks:
            if plan.checkpoints(i) and plan.components.early_recompute:
                yield from self._recompute(i, j)
            if j < plan.n - 1:
                yield from self._await(i, j)
            yield from self._backward(i, j)
            if j:
                yield from self._send(i, j)

    def _recompute(self, i: int, j: int) -> Iterator[int | None]:
        node = self._lanes.running[i, j]
        if node.kind != "checkpoint":
            return iter(())
        node.filled = True
        return self._host.forward(node, again=True)

    def _await(self, i: int, j: int) -> Iterator[int | None]:
        while not self._sent[j]:
            self._waiting[j] = self._clock.current
            yield None
        self._sent[j] -= 1
        self._clock.wait(self._places.computing[j], self._places.copying(i, j))

    def _backward(self, i: int, j: int) -> Iterator[int | None]:
        node = self._lanes.running[i, j]
        if not self._host.workload.task(i, j).learns:
            return
        if not node.filled:
            yield from self._recompute(i, j)
        yield from self._host.backward(node)

    def _send(self, i: int, j: int) -> Iterator[int | None]:
        self._clock.wait(self._places.copying(i, j), self._places.computing[j])
        for copy in self._lanes.arrived.get((i, j), ()):
            if copy.returned:
                yield from self._host.transfer(copy, back=True)
        self._sent[j - 1] += 1
        if j - 1 in self._waiting:
            self._clock.resume(self._waiting.pop(j - 1))
