"""The backward pass of ``backward='scheduled'``: each partition's worker runs its own tasks, in reversed order.

The steps of a task are written down by the program that the engine runs, :func:`gpipe_bench.program.run_backward_task`,
and carried out by the threads of the simulation. No node stands between the tasks, so there is no autograd to model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from gpipe_bench.program import Plan, backward_order, run_backward_task
from gpipe_bench.simulator.host.host import Host
from gpipe_bench.simulator.host.recording import RecordingLanes
from gpipe_bench.simulator.virtual_time.places import Places
from gpipe_bench.simulator.virtual_time.streams import Thread

__all__ = ["ScheduledBackward"]


class _Steps:
    """The steps of one task as their names: a recording form of :class:`gpipe_bench.program.BackwardLanes`."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def recompute_ahead(self, _i: int, _j: int) -> None:
        self.names.append("recompute")

    def await_grads(self, _i: int, _j: int) -> None:
        self.names.append("await")

    def backward(self, _i: int, _j: int) -> None:
        self.names.append("backward")

    def send_grads(self, _i: int, _j: int) -> None:
        self.names.append("send")


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
        order = backward_order(self._plan)
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
        for i, j in tasks:
            steps = _Steps()
            run_backward_task(self._plan, steps, i, j)
            for name in steps.names:
                yield from getattr(self, f"_{name}")(i, j)

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
        if not j:
            return
        self._clock.wait(self._places.copying(i, j), self._places.computing[j])
        for copy in self._lanes.arrived.get((i, j), ()):
            if copy.returned:
                yield from self._host.transfer(copy, back=True)
        self._sent[j - 1] += 1
        if j - 1 in self._waiting:
            self._clock.resume(self._waiting.pop(j - 1))
