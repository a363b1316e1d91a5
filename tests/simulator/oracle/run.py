"""The oracle of the clock in C: the same in Python. One forward program, one autograd model, one clock.

    program ──> recording lanes ──> shadow graph and host actions
                                         │
    calling thread, workers, autograd threads issue ──> streams and engines of the clock
                                         │
                                    allocators

Everything is integers, so results are the same on every machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import accumulate, pairwise, repeat
from typing import NamedTuple

from gpipe_bench.schedules.program import Plan, run_forward
from gpipe_bench.simulator.clock.latency import latencies
from gpipe_bench.simulator.clock.list_rows import chosen_schedule, lists_of
from gpipe_bench.simulator.clock.settings import Settings
from gpipe_bench.simulator.workloads.workload import Machine, Workload
from gpipe_bench.util.collection import no_collection
from tests.simulator.oracle.autograd import Autograd
from tests.simulator.oracle.clock import Clock
from tests.simulator.oracle.graph import Node
from tests.simulator.oracle.host import Host, Issued
from tests.simulator.oracle.lists import Lists, record_cells
from tests.simulator.oracle.memory import Memory
from tests.simulator.oracle.places import Places
from tests.simulator.oracle.recording import COLLECT, COPY, LAUNCH, SYNC, RecordingLanes
from tests.simulator.oracle.streams import Thread

__all__ = ["OracleRun", "run_whole"]


class OracleRun(NamedTuple):
    """What a simulation gives; attributes as those of :class:`gpipe_bench.simulator.clock.run.Run`."""

    makespan_ns: int
    step_ends_ns: tuple[int, ...]
    issued: tuple[Issued, ...]
    peak_live_bytes: tuple[int, ...]
    peak_allocated_bytes: tuple[int, ...]
    peak_reserved_bytes: tuple[int, ...]
    flushes: tuple[int, ...]


def run_whole(workload: Workload, machine: Machine, settings: Settings) -> OracleRun:
    """Simulate every task on the clock; ``workload``: as :meth:`Workload.chosen` gives it."""
    with no_collection():
        simulation = _Simulation(workload, machine, settings)
        try:
            return simulation.run()
        finally:
            simulation.forget()


class _Simulation:
    """The host threads of a pipeline but those of autograd."""

    def __init__(self, workload: Workload, machine: Machine, settings: Settings) -> None:
        self.schedule = settings.schedule and chosen_schedule(
            settings.schedule, workload.m, workload.n, settings.devices
        )
        rows = self.schedule.placement if self.schedule else tuple(range(workload.n))
        devices = settings.devices or rows
        if len(devices) != workload.n:
            raise ValueError(f"devices must be one per partition, got {len(devices)} for {workload.n}; name each")
        components = settings.components
        self.workload, self.settings = workload, settings
        self.places = Places(
            devices,
            copy_streams=components.copy_streams and workload.n > 1,
            transfer=settings.transfer,
            streams=settings.streams,
            rows=rows,
        )
        for j in range(workload.n):
            self.places.copying(workload.m - 1, j)
        self.lanes = self._record()
        self.clock = Clock(
            len(self.places.device_of), 3 * self.places.count, machine.queue_depth, self.places.device_of
        )
        riding = not components.portals
        self.memory = (
            Memory(
                workload,
                self.places,
                self.clock,
                capacity=machine.capacity_bytes,
                riding=riding,
                published=settings.flavour == "published",
                scheduled=self.schedule is not None,
            )
            if settings.memory
            else None
        )
        self.host = Host(workload, machine, self.places, self.clock, self.memory)
        self.inboxes: dict[int, deque[Node]] = {}
        self.asleep: dict[int, Thread] = {}
        self.done: set[Node] = set()
        self.collecting: Node | None = None
        self.step_starts: list[int] = []
        mean = settings.nesting_ns[1]
        self.latencies = repeat(mean) if settings.seed is None else latencies(mean, settings.seed)
        self.caller = self._caller()

    def run(self) -> OracleRun:
        self.clock.resume(self.caller)
        end = self.clock.run()
        steps = pairwise([*self.step_starts, len(self.host.issued)])
        ends = (max((task.last.end for task in self.host.issued[start:stop]), default=0) for start, stop in steps)
        allocators = [] if self.memory is None else self.memory.devices
        return OracleRun(
            makespan_ns=end,
            step_ends_ns=tuple(accumulate(ends, max)),
            issued=tuple(self.host.issued),
            peak_live_bytes=tuple(allocator.peak_live for allocator in allocators),
            peak_allocated_bytes=tuple(allocator.peak_allocated for allocator in allocators),
            peak_reserved_bytes=tuple(allocator.peak_reserved for allocator in allocators),
            flushes=tuple(allocator.flushes for allocator in allocators),
        )

    def forget(self) -> None:
        """Let go of everything, which refers to each other in circles and would stay until a collection."""
        for part in (self.memory, self.host, self.lanes, self):
            if part is not None:
                vars(part).clear()

    def _record(self) -> RecordingLanes:
        work, settings = self.workload, self.settings
        arrivals = {j: [skip.key for skip in work.skips if skip.target == j != skip.source] for j in range(work.n)}
        plan = Plan(work.m, work.n, settings.components, settings.checkpoint, arrivals)
        workers = settings.workers and settings.components.clock_cycle and work.n > 1
        lanes = RecordingLanes(
            work,
            settings.components,
            self.places,
            workers=workers,
            published=settings.flavour == "published",
        )
        self.workers, self.plan = workers, plan
        if self.schedule:
            ahead = plan.checkpointed if settings.components.early_recompute else 0
            groups = self.places.devices if settings.streams else self.places.rows
            self.lists, self.ahead = lists_of(
                self.schedule, self.places.rows, groups if workers else (0,) * work.n, ahead
            )
            record_cells(lanes, work, self.lists, plan.checkpointed)
            return lanes
        run_forward(plan, lanes)
        lanes.keep()
        return lanes

    def _caller(self) -> Thread:
        """The calling thread: forward pass, loss, backward pass and update of each step."""
        for step in range(self.settings.steps):
            if step:
                self.lanes.rewind()
                if self.memory is not None:
                    self.memory.next_step()
            self.step_starts.append(len(self.host.issued))
            if self.schedule:
                Lists(self.lanes, self.workload, self.places, self.host, self.lists, self.ahead).start(self.caller)
                yield None
            else:
                yield from self._forward()
                if self.memory is not None:
                    self.memory.loss()
                yield from self._backward()
            for stream, kernels in zip(self.places.computing, self.workload.optimizer, strict=False):
                yield from self.host.kernels(stream, kernels)
            if self.memory is not None:
                self.memory.update()

    def _backward(self) -> Iterator[int | None]:
        autograd = Autograd(
            self.host,
            range(self.places.count) if self.settings.streams else [0] * self.places.count,
            flavour=self.settings.flavour,
            prepare_ns=self.settings.nesting_ns[0],
            latencies=self.latencies,
            finished=self.caller,
        )
        autograd.start(self.lanes.root())
        yield None

    def _forward(self) -> Iterator[int | None]:
        for what, node, waiter, awaited in self.lanes.actions:
            if what == SYNC:
                self.clock.wait(waiter, awaited)
            elif node is None:
                continue
            elif what == COPY:
                yield from self.host.transfer(node)
            elif what == LAUNCH:
                if self.workers:
                    self._submit(node)
                else:
                    yield from self.host.forward(node)
            elif what == COLLECT:
                if self.workers and node not in self.done:
                    self.collecting = node
                    yield None
                self.done.discard(node)
                if self.memory is not None:
                    self.memory.collected(node)

    def _submit(self, node: Node) -> None:
        """Hand a task to its worker."""
        worker = self.places.workers[node.j]
        if worker not in self.inboxes:
            self.inboxes[worker] = deque()
            self.asleep[worker] = self._worker(worker)
        self.inboxes[worker].append(node)
        thread = self.asleep.pop(worker, None)
        if thread is not None:
            self.clock.resume(thread)

    def _worker(self, worker: int) -> Thread:
        inbox = self.inboxes[worker]
        while True:
            while inbox:
                node = inbox.popleft()
                yield from self.host.forward(node)
                self.done.add(node)
                if node is self.collecting:
                    self.collecting = None
                    self.clock.resume(self.caller)
            self.asleep[worker] = self.clock.current
            yield None
