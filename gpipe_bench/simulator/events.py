"""The event simulation: one forward program, one autograd model, one clock.

    program ──> recording lanes ──> shadow graph and host actions
                                         │
    calling thread, workers, autograd threads issue ──> streams and engines of the clock
                                         │
                                    allocators

Everything is integers, so results are the same on every machine.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpipe_bench.components import Components
from gpipe_bench.program import Plan, run_forward
from gpipe_bench.schedule import CHECKPOINT_MODES
from gpipe_bench.simulator.autograd import FLAVOURS, Autograd
from gpipe_bench.simulator.clock import Clock
from gpipe_bench.simulator.graph import Node
from gpipe_bench.simulator.host import Host, Issued
from gpipe_bench.simulator.memory import Memory
from gpipe_bench.simulator.places import Places
from gpipe_bench.simulator.recording import COLLECT, COPY, LAUNCH, SYNC, RecordingLanes
from gpipe_bench.simulator.streams import Thread
from gpipe_bench.simulator.workload import Machine, Workload
from gpipe_bench.timeline import TimelineEvent

__all__ = ["Run", "Settings", "run"]

_TRANSFERS = ("direct", "host")


@dataclass(frozen=True, slots=True)
class Settings:
    """How the engine runs a workload.

    Attributes:
        components: which components are on.
        checkpoint: ``always``, ``except_last`` or ``never``.
        flavour: which autograd engine, see :mod:`gpipe_bench.simulator.autograd`.
        transfer: ``direct`` or ``host``.
        devices: device of each partition; empty: one each.
        streams: whether devices have streams; the CPU has none.
        nesting_ns: of a nested backward pass in flavour ``published``, the host's time to prepare it and the latency of
            its root; how many checkpoints nest before the first comes back hangs on their ratio, a race of the host.
        marks: whether an observer marks backward passes without checkpoint.
        memory: whether to follow the allocators.
        steps: training steps, back to back: the host does not wait for the devices between them.
    """

    components: Components = field(default_factory=Components)
    checkpoint: str = "except_last"
    flavour: str = "current"
    transfer: str = "direct"
    devices: tuple[int, ...] = ()
    streams: bool = True
    nesting_ns: tuple[int, int] = (60_000, 60_000)
    marks: bool = False
    memory: bool = True
    steps: int = 1

    def __post_init__(self) -> None:
        for name, allowed in (("checkpoint", CHECKPOINT_MODES), ("flavour", FLAVOURS), ("transfer", _TRANSFERS)):
            if getattr(self, name) not in allowed:
                got = getattr(self, name)
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {got!r}; choose one of them")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}; simulate one step or more")


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation gives.

    Attributes:
        makespan_ns: when the last operation ended.
        step_ends_ns: when the last operation of each step ended.
        issued: every task, in the order in which host threads issued it.
        peak_live_bytes: per device, of all tensors; empty without memory.
        peak_allocated_bytes: the same, rounded as the allocator rounds.
        peak_reserved_bytes: of segments.
        flushes: per device, how often its allocator gave cached segments back.
    """

    makespan_ns: int
    step_ends_ns: tuple[int, ...]
    issued: tuple[Issued, ...]
    peak_live_bytes: tuple[int, ...]
    peak_allocated_bytes: tuple[int, ...]
    peak_reserved_bytes: tuple[int, ...]
    flushes: tuple[int, ...]

    def events(self, device: str = "cuda") -> list[TimelineEvent]:
        """The timeline, in the order of starts.

        Args:
            device: type of device in the names of devices.
        """
        events = [
            TimelineEvent(
                f"{device}:{task.device}", task.stream, task.kind, task.i, task.j, task.issue_ns / 1e3,
                task.first.start / 1e3, task.last.end / 1e3, task.nbytes,
            )
            for task in self.issued
        ]  # fmt: skip
        return sorted(events, key=lambda event: (event.start_us, event.end_us, event.partition))


def run(workload: Workload, machine: Machine, settings: Settings | None = None) -> Run:
    """Simulate training steps.

    Raises:
        ValueError: devices do not fit the workload.
        OutOfMemory: a device's capacity does not suffice.
    """
    with _collector_paused():
        return _Simulation(workload, machine, settings or Settings()).run()


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Let the cycle collector rest: everything is kept until the end, and it would search it all again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Simulation:
    """The host threads of a pipeline but those of autograd."""

    def __init__(self, workload: Workload, machine: Machine, settings: Settings) -> None:
        devices = settings.devices or tuple(range(workload.n))
        if len(devices) != workload.n:
            raise ValueError(f"devices must be one per partition, got {len(devices)} for {workload.n}; name each")
        components = settings.components
        self.workload, self.settings = workload, settings
        self.places = Places(
            devices, copy_streams=components.copy_streams, transfer=settings.transfer, streams=settings.streams
        )
        # Copy streams are handed out while lanes are recorded, so the first step is recorded before the clock starts.
        self.lanes = self._record()
        self.clock = Clock(len(self.places.device_of), 3 * self.places.count, machine.queue_depth)
        riding = not components.portals
        self.memory = (
            Memory(workload, self.places, self.clock, capacity=machine.capacity_bytes, riding=riding)
            if settings.memory
            else None
        )
        self.host = Host(workload, machine, self.places, self.clock, self.memory)
        self.inboxes: dict[int, deque[Node]] = {}
        self.asleep: dict[int, Thread] = {}
        self.done: set[Node] = set()
        self.collecting: Node | None = None
        self.step_starts: list[int] = []
        self.caller = self._caller()

    def run(self) -> Run:
        self.clock.resume(self.caller)
        end = self.clock.run()
        bounds = [*self.step_starts[1:], len(self.host.issued)]
        allocators = [] if self.memory is None else self.memory.devices
        return Run(
            makespan_ns=end,
            step_ends_ns=tuple(max(task.last.end for task in self.host.issued[:bound]) for bound in bounds),
            issued=tuple(self.host.issued),
            peak_live_bytes=tuple(allocator.peak_live for allocator in allocators),
            peak_allocated_bytes=tuple(allocator.peak_allocated for allocator in allocators),
            peak_reserved_bytes=tuple(allocator.peak_reserved for allocator in allocators),
            flushes=tuple(allocator.flushes for allocator in allocators),
        )

    def _record(self) -> RecordingLanes:
        work, settings = self.workload, self.settings
        arrivals = {j: [skip.key for skip in work.skips if skip.target == j != skip.source] for j in range(work.n)}
        plan = Plan(work.m, work.n, settings.components, settings.checkpoint, arrivals)
        workers = settings.components.clock_cycle and work.n > 1
        lanes = RecordingLanes(work, settings.components, self.places, workers=workers, marks=settings.marks)
        self.workers = workers
        run_forward(plan, lanes)
        return lanes

    def _caller(self) -> Thread:
        """The calling thread: forward pass, loss, backward pass and update of each step."""
        for step in range(self.settings.steps):
            if step:
                self.lanes = self._record()
                if self.memory is not None:
                    self.memory.next_step()
            self.step_starts.append(len(self.host.issued))
            yield from self._forward()
            if self.memory is not None:
                self.memory.loss()
            devices = self.places.count if self.settings.streams else 1
            flavour, nesting_ns = self.settings.flavour, self.settings.nesting_ns
            autograd = Autograd(self.host, devices, flavour=flavour, nesting_ns=nesting_ns, finished=self.caller)
            autograd.start(self.lanes.root())
            yield None
            for stream, kernels in zip(self.places.computing, self.workload.optimizer, strict=False):
                yield from self.host.kernels(stream, kernels)

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
            elif what == COLLECT and self.workers:
                if node not in self.done:
                    self.collecting = node
                    yield None
                self.done.discard(node)

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
