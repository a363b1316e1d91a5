"""What host threads issue: the transfers and computations of one step, with what each costs the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from gpipe_bench.simulator.workloads.workload import HOST, NOTHING, Kernels, Machine, SplitWork, TaskWork, Workload
from tests.simulator.oracle.clock import Clock
from tests.simulator.oracle.graph import Node
from tests.simulator.oracle.memory import Memory
from tests.simulator.oracle.places import Places
from tests.simulator.oracle.streams import Operation, Thread

__all__ = ["Host", "Issued"]


@dataclass(slots=True)
class Issued:
    """A task as a host thread issued it.

    Attributes:
        kind: one of :data:`gpipe_bench.results.timeline.KINDS`.
        i: micro-batch.
        j: partition.
        device: the device that runs it, for a copy the sender's.
        stream: ``compute`` or ``copy``.
        issue_ns: when.
        first: its first operation.
        last: its last operation.
        nbytes: bytes moved by a copy, or of the results of a forward pass.
    """

    kind: str
    i: int
    j: int
    device: int
    stream: str
    issue_ns: int
    first: Operation
    last: Operation
    nbytes: int


class Host:
    """Issues tasks to the clock on behalf of host threads.

    Args:
        workload: what a task costs.
        machine: what copies and launches cost.
        places: devices and streams.
        clock: where operations go.
        memory: told of what is allocated and freed, or None.

    Attributes:
        issued: all tasks, in the order of issue.
    """

    def __init__(
        self, workload: Workload, machine: Machine, places: Places, clock: Clock, memory: Memory | None
    ) -> None:
        self.issued: list[Issued] = []
        self.clock = clock
        self.memory = memory
        self.workload = workload
        self._machine = machine
        # Asked for often.
        self._launch_ns, self._depth = machine.launch_ns, machine.queue_depth
        self._places = places
        self._copies: dict[tuple[int, int, tuple[int, ...]], int] = {}
        self._buses: dict[tuple[int, int], int] = {}
        self._directs: dict[tuple[int, int, tuple[int, ...]], tuple[int, tuple[int, ...]]] = {}

    def forward(self, node: Node, *, again: bool = False) -> Iterator[int | None]:
        """A forward pass: the plain one, a checkpoint's first, or its recomputation (``again``)."""
        work = self.workload.task(node.i, node.j)
        kind, kernels = ("recompute", work.recompute) if again else ("forward", work.forward)
        nbytes = sum(work.output_bytes)
        if self.memory is not None:
            self.memory.forward(node, again=again)
            if self.memory.flushed(node.device):
                return self._drained(node.device, partial(self._compute, kind, node, kernels, nbytes))
        return self._compute(kind, node, kernels, nbytes)

    def backward(self, node: Node, kind: str = "backward") -> Iterator[int | None]:
        """The backward pass of a task, or of ``kind`` ``backward_inputs`` or ``backward_weights`` a half of it."""
        work: TaskWork = self.workload.task(node.i, node.j)
        kernels = work.backward
        if self.memory is not None:
            self.memory.backward(node, kind)
        if kind != "backward":
            halves = work.split or SplitWork(NOTHING, NOTHING)
            kernels = halves.inputs if kind == "backward_inputs" else halves.weights
            # One may have nothing to compute.
            if kernels == NOTHING:
                return iter(())
        if self.memory is not None and self.memory.flushed(node.device):
            return self._drained(node.device, partial(self._compute, kind, node, kernels, 0))
        return self._compute(kind, node, kernels, 0)

    def kernels(self, stream: int, kernels: Kernels) -> Iterator[int | None]:
        """Kernels that belong to no task."""
        if kernels.duration_ns or kernels.launches:
            yield from self._launch(stream, kernels)

    def transfer(self, node: Node, *, back: bool = False) -> Iterator[int | None]:
        """The copy of a node, or the copy of its gradients ``back``."""
        if self.memory is not None:
            self.memory.transfer(node, back=back)
            receiver = self._places.devices[node.source] if back else node.device
            if self.memory.flushed(receiver):
                return self._drained(receiver, partial(self._transfer, node, back=back))
        return self._transfer(node, back=back)

    def _transfer(self, node: Node, *, back: bool) -> Iterator[int | None]:
        places, clock, nbytes = self._places, self.clock, node.returned if back else node.nbytes
        if back:
            kind, begin, sender, receiver = f"{node.kind}_grad", node.j, node.stream, node.peer
            source, target = node.device, places.devices[node.source]
        else:
            kind, begin, sender, receiver = node.kind, node.source, node.peer, node.stream
            source, target = places.devices[node.source], node.device
        lane = "compute" if sender == places.computing[begin] else "copy"
        host_ns, now = self._launch_ns * len(nbytes), clock.now
        if places.transfer == "direct":
            length, engines = self._direct(source, target, nbytes)
            ends = (sender, receiver)
            first = last = clock.issue(ends, length, engines=engines, launches=len(nbytes), host_ns=host_ns)
        else:
            first, last = self._staged(sender, receiver, source, target, nbytes)
            host_ns *= 2
        self.issued.append(Issued(kind, node.i, node.j, source, lane, now, first, last, sum(nbytes)))
        if self.memory is not None:
            self.memory.transferred()
        return self._pass_time(sender, host_ns)

    def _direct(self, source: int, target: int, nbytes: tuple[int, ...]) -> tuple[int, tuple[int, ...]]:
        """Time and engines of a transfer from device to device."""
        key = source, target, nbytes
        if key not in self._directs:
            count = self._places.count
            engines = (count + source, 2 * count + target, *self._shared(source, target))
            self._directs[key] = self._length(source, target, nbytes), engines
        return self._directs[key]

    def _drained(self, device: int, issue: Callable[[], Iterator[int | None]]) -> Thread:
        """Issue when the device is idle."""
        streams = tuple(stream for stream, place in enumerate(self._places.device_of) if place == device)
        idle = self.clock.issue(streams, 0, engines=(), launches=0, host_ns=0)
        self.clock.after_start(idle, self.clock.current)
        yield None
        yield from issue()

    def _staged(
        self, sender: int, receiver: int, source: int, target: int, nbytes: tuple[int, ...]
    ) -> tuple[Operation, Operation]:
        """Through host memory, tensor by tensor, with the barrier that a direct copy has by itself."""
        clock, places, host_ns = self.clock, self._places.count, self._launch_ns
        down, up = (places + source,), (2 * places + target,)
        clock.wait(sender, receiver)
        clock.wait(receiver, sender)
        operations: list[Operation] = []
        # Of no tensors, one operation that takes no time stands for all.
        for index, size in enumerate(nbytes or (0,)):
            lengths = [self._length(*ends, (size,) if nbytes else ()) for ends in ((source, HOST), (HOST, target))]
            begun = 2 * index * host_ns
            operations.append(clock.issue((sender,), lengths[0], engines=down, launches=1, host_ns=begun + host_ns))
            clock.wait(receiver, sender)
            operations.append(clock.issue((receiver,), lengths[1], engines=up, launches=1, host_ns=begun + 2 * host_ns))
        return operations[0], operations[-1]

    def _shared(self, source: int, target: int) -> tuple[int, ...]:
        """The engines of what a transfer shares with those of other devices."""
        buses = self._machine.buses(source, target)
        for bus in buses:
            if bus not in self._buses:
                self._buses[bus] = self.clock.add_engine()
        return tuple(map(self._buses.__getitem__, buses))

    def _length(self, source: int, target: int, nbytes: tuple[int, ...]) -> int:
        key = (source, target, nbytes)
        if key not in self._copies:
            self._copies[key] = sum(self._machine.copy_ns(source, target, size) for size in nbytes)
        return self._copies[key]

    def _compute(self, kind: str, node: Node, kernels: Kernels, nbytes: int) -> Iterator[int | None]:
        stream, now = self._places.computing[node.j], self.clock.now
        host_ns = self._launch_ns * kernels.launches
        operation = self.clock.issue(
            (stream,), kernels.duration_ns, engines=(node.device,), launches=kernels.launches, host_ns=host_ns
        )
        self.issued.append(Issued(kind, node.i, node.j, node.device, "compute", now, operation, operation, nbytes))
        return self._pass_time(stream, host_ns)

    def _launch(self, stream: int, kernels: Kernels) -> Iterator[int | None]:
        host_ns = self._launch_ns * kernels.launches
        engines = (self._places.device_of[stream],)
        self.clock.issue((stream,), kernels.duration_ns, engines=engines, launches=kernels.launches, host_ns=host_ns)
        return self._pass_time(stream, host_ns)

    def _pass_time(self, stream: int, host_ns: int) -> Iterator[int | None]:
        """The host's time for what it issued: its calls, and a wait where the launch queue is full."""
        now = self.clock.now
        done = now + host_ns
        if not self._depth:
            # Even if it is none, other threads may come in between.
            return iter((done,))
        room = self.clock.full_until(stream)
        if isinstance(room, Operation):
            return self._await_room(stream, room, done)
        until = max(room, done)
        return iter((until,) if until > now else ())

    def _await_room(self, stream: int, first: Operation, done: int) -> Thread:
        until: int | Operation = first
        while isinstance(until, Operation):
            # Resumed when it starts: the room that it leaves is known then.
            self.clock.after_start(until, self.clock.current)
            yield None
            until = self.clock.full_until(stream)
        if max(until, done) > self.clock.now:
            yield max(until, done)
