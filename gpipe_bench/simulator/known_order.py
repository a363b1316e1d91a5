"""Host threads whose order of issue is known beforehand, one turn after the other.

With clock-cycles, Fork and Join, copy streams and a device per partition no host thread has a choice, with or without
skips; what is open is when its turn comes, and with it what is on a copy stream that it shares with another thread:

    calling thread   of a cycle (i,j): portals into j, copy j-1 -> j; hands the tasks to the workers; collects them
    worker j         F(i,j)
    thread j         R(i,j)   B(i,j)   gradient j -> j-1   gradients of the skips that came, the last one first

A gradient's copy leads on to the stream of its receiver, of which another thread may have got hold in the meantime.
"""

from __future__ import annotations

from collections import Counter
from typing import Final

from gpipe_bench.schedule import Cycle, checkpoint_stop, clock_cycles
from gpipe_bench.simulator.graph import Node
from gpipe_bench.simulator.known_agenda import Agenda, Turns
from gpipe_bench.simulator.known_operations import Operations
from gpipe_bench.simulator.memory import Memory
from gpipe_bench.simulator.outcome import Settings
from gpipe_bench.simulator.places import POOL, Places
from gpipe_bench.simulator.workload import Machine, SkipWork, Workload

__all__ = ["Flushed", "KnownOrder"]

_NOBODY: Final = -1


class Flushed(Exception):  # noqa: N818 - a signal: another way has to be taken
    """A device was full, and its threads wait for it."""


class KnownOrder:
    """Runs training steps.

    Args:
        workload: what to run; skips go through portals.
        machine: on what.
        settings: how.
        in_order: whether copies of links that nothing shares are taken to come in order.

    Attributes:
        agenda: all that ran.
        steps: of each step by kind the numbers of the operations of tasks (i,j) at i n + j, -1 where there are none;
            ``portal KEY`` and ``portal_grad KEY`` for each skip.
        instants: of each step when the calling thread came to the loss, and when it was through with the update, each
            with its entry.
        held: of each step what was on the streams of the backward pass of each task (i,j), at i n + j: operations on
            that of computations, and on that of copies.
        makespan: the end of everything.
        memory: of all devices, or None.

    Raises:
        Disorder: copies do not come in order.
        Flushed: a device was full.
        OutOfMemory: a device's capacity does not suffice.
    """

    def __init__(self, workload: Workload, machine: Machine, settings: Settings, *, in_order: bool = True) -> None:
        self._work, self._machine, self._settings = workload, machine, settings
        self._m, self._n = workload.m, workload.n
        devices = settings.devices or tuple(range(self._n))
        self._places = Places(devices, copy_streams=True, transfer="direct")
        slots = [[self._places.copying(i, j) for j in range(self._n)] for i in range(min(POOL, self._m))]
        self._copying = [slots[i % POOL] for i in range(self._m)]
        self._computing = self._places.computing
        self._again = checkpoint_stop(settings.checkpoint, self._m)
        self._early = settings.components.early_recompute
        crossing = [skip for skip in workload.skips if skip.source != skip.target]
        self._skips = [[skip for skip in crossing if skip.target == j] for j in range(self._n)]
        self._awaits = [int(j + 1 < self._n) + sum(skip.source == j for skip in crossing) for j in range(self._n)]
        keys = [f"{kind} {skip.key}" for skip in crossing for kind in ("portal", "portal_grad")]
        self._kinds = ("forward", "recompute", "backward", "copy", "copy_grad", *keys)
        self._number_links(crossing, machine, devices, in_order=in_order)
        self.agenda = Agenda(machine, Operations(self._engines, self._shared), len(self._places.device_of))
        self.memory: Memory | None = None
        if settings.memory:
            self.memory = Memory(
                workload, self._places, self.agenda, capacity=machine.capacity_bytes, riding=False, tally=settings.tally
            )
        self.steps: list[dict[str, list[int]]] = []
        self._now: dict[str, list[int]] = {}
        self.instants: list[list[tuple[int, int]]] = []
        self.held: list[tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = []
        self._nodes = [self._node(i, j) for i in range(self._m) for j in range(self._n)]
        self._caller = self._call()
        self._collecting = _NOBODY
        self._lengths: dict[tuple[tuple[int, int], tuple[int, ...]], int] = {}
        # Of the backward pass: a thread of each device, which micro-batch it waits for, and what came for each task.
        self._threads: list[Turns] = []
        self._waits: list[int] = []
        self._came: list[int] = []
        self.agenda.enter(self._caller)
        self.agenda.run()
        self.makespan = max(self.agenda.now, *self.agenda.operations.ends)

    def _number_links(
        self, crossing: list[SkipWork], machine: Machine, devices: tuple[int, ...], *, in_order: bool
    ) -> None:
        """Links between partitions, their engines, and which of them are shared."""
        ways = [(j - 1, j) for j in range(1, self._n)] + [(skip.source, skip.target) for skip in crossing]
        ways += [way[::-1] for way in ways]
        self._link_of = {way: number for number, way in enumerate(dict.fromkeys(ways))}
        self._engines: list[tuple[int, ...]] = []
        buses: dict[tuple[int, int], int] = {}
        for source, target in self._link_of:
            bus = machine.bus(devices[source], devices[target])
            shared = () if bus is None else (2 * self._n + buses.setdefault(bus, len(buses)),)
            self._engines.append((source, self._n + target, *shared))
        # A pass is over on all devices of a copy before the other one begins there.
        half = len(ways) // 2
        uses = [Counter(self._link_of[way] for way in part) for part in (ways[:half], ways[half:])]
        self._shared = [not in_order] * len(self._engines)
        for links in uses:
            engines = Counter(engine for link in links for engine in self._engines[link])
            for link, times in links.items():
                self._shared[link] |= times > 1 or any(engines[engine] > 1 for engine in self._engines[link])

    def _node(self, i: int, j: int) -> tuple[Node, Node, list[Node]]:
        """A task, the copy into it and the portals into it, as :class:`gpipe_bench.simulator.memory.Memory` asks."""
        places, size = self._places, self._work.microbatch_sizes[i]
        own, kind = self._copying[i], "checkpoint" if i < self._again else "task"
        task = Node(kind, (i, j), places.devices[j], stream=self._computing[j], peer=self._computing[j])
        copy = Node("copy", (i, j), places.devices[j], stream=own[j], peer=own[j - 1])
        copy.source, copy.nbytes = j - 1, self._work.task(i, j).input_bytes
        copy.returned = copy.nbytes
        portals = []
        for skip in self._skips[j]:
            portal = Node("portal", (i, j), places.devices[j], stream=own[j], peer=own[skip.source])
            portal.source, portal.skip, portal.nbytes = skip.source, skip.key, (skip.bytes[size],)
            portal.returned = portal.nbytes
            portals.append(portal)
        return task, copy, portals

    def forget(self) -> None:
        """Let go of everything, which refers to each other in circles."""
        for part in (self.memory, self.agenda, self):
            if part is not None:
                vars(part).clear()

    # --- what threads issue --------------------------------------------------------------------------------------

    def _compute(self, kind: str, i: int, j: int) -> None:
        work, agenda, memory = self._work.task(i, j), self.agenda, self.memory
        if memory is not None:
            node = self._nodes[i * self._n + j][0]
            agenda.passed()
            if kind == "backward":
                memory.backward(node)
            else:
                memory.forward(node, again=kind == "recompute")
            self._check(j)
        if kind == "backward":
            streams, (computing, copying) = agenda.streams, self.held[-1]
            computing[i * self._n + j] = streams[self._computing[j]]
            copying[i * self._n + j] = streams[self._copying[i][j]]
        self._now[kind][i * self._n + j] = agenda.compute(self._computing[j], getattr(work, kind))

    def _transfer(self, node: Node, *, back: bool) -> None:
        agenda, memory, i, j = self.agenda, self.memory, node.i, node.j
        if memory is not None:
            agenda.passed()
            memory.transfer(node, back=back)
            self._check(node.source if back else j)
        way = (j, node.source) if back else (node.source, j)
        streams = (node.stream, node.peer) if back else (node.peer, node.stream)
        length = self._length(way, node.nbytes)
        number = agenda.copy(streams, self._link_of[way], length, len(node.nbytes))
        kind = f"{node.kind}_grad" if back else node.kind
        kind = kind if node.skip is None else f"{kind} {node.skip}"
        self._now[kind][i * self._n + j] = number
        if memory is not None:
            memory.transferred()

    def _length(self, way: tuple[int, int], nbytes: tuple[int, ...]) -> int:
        key = way, nbytes
        if key not in self._lengths:
            ends = self._places.devices[way[0]], self._places.devices[way[1]]
            self._lengths[key] = sum(self._machine.copy_ns(*ends, size) for size in nbytes)
        return self._lengths[key]

    def _check(self, j: int) -> None:
        if self.memory is not None and self.memory.flushed(self._places.devices[j]):
            raise Flushed

    # --- the calling thread --------------------------------------------------------------------------------------

    def _call(self) -> Turns:
        agenda, memory, work = self.agenda, self.memory, self._work
        for step in range(self._settings.steps):
            tasks = self._m * self._n
            self._now = {kind: [_NOBODY] * tasks for kind in self._kinds}
            self.steps.append(self._now)
            self.held.append(([()] * tasks, [()] * tasks))
            if step and memory is not None:
                memory.next_step()
            for cycle in clock_cycles(self._m, self._n):
                yield from self._cycle(cycle)
            self.instants.append([agenda.turn])
            if memory is not None:
                agenda.passed()
                memory.loss()
            self._came = [0] * (self._m * self._n)
            self._waits = [self._m - 1] * (self._n - 1) + [_NOBODY]
            self._threads = [self._serve(j) for j in range(self._n)]
            agenda.enter(self._threads[-1])
            yield
            for stream, kernels in zip(self._computing, work.optimizer, strict=False):
                if kernels.duration_ns or kernels.launches:
                    agenda.compute(stream, kernels)
                    yield
            self.instants[-1].append(agenda.turn)
            if memory is not None:
                agenda.passed()
                memory.update()

    def _cycle(self, cycle: Cycle) -> Turns:
        agenda, n = self.agenda, self._n
        for i, j in cycle:
            _, copy, portals = self._nodes[i * n + j]
            for node in (*portals, copy) if j else ():
                self._transfer(node, back=False)
                yield
        for i, j in cycle:
            if j:
                agenda.wait(self._computing[j], self._copying[i][j])
        done: set[int] = set()
        for i, j in cycle:
            agenda.enter(self._work_on(i, j, done))
        for i, j in cycle:
            self._collecting = j
            if j not in done:
                yield
            if self.memory is not None:
                self.memory.collected(self._nodes[i * n + j][0])
            if j + 1 < n:
                agenda.wait(self._copying[i][j], self._computing[j])
        self._collecting = _NOBODY

    def _work_on(self, i: int, j: int, done: set[int]) -> Turns:
        """The turns of a worker, which the clock's goes through as well."""
        self._compute("forward", i, j)
        yield
        done.add(j)
        if self._collecting == j:
            self.agenda.enter(self._caller)

    # --- threads of devices --------------------------------------------------------------------------------------

    def _serve(self, j: int) -> Turns:
        """The backward pass of a partition."""
        agenda, n, computing, awaits = self.agenda, self._n, self._computing[j], self._awaits[j]
        loss = self._work.loss
        if j == n - 1 and (loss.duration_ns or loss.launches):
            agenda.compute(computing, loss)
            yield
        for i in reversed(range(self._m)):
            if self._came[i * n + j] < awaits:
                self._waits[j] = i
                yield
            copying, again = self._copying[i][j], i < self._again
            if again and self._early:
                self._compute("recompute", i, j)
                yield
            if j + 1 < n:
                agenda.wait(computing, copying)
            if again and not self._early:
                self._compute("recompute", i, j)
                yield
            self._compute("backward", i, j)
            yield
            if j:
                yield from self._send(i, j)
        if not j:
            agenda.enter(self._caller)

    def _send(self, i: int, j: int) -> Turns:
        """The gradients of what came into a task."""
        agenda, n, own = self.agenda, self._n, self._copying[i]
        agenda.wait(own[j], self._computing[j])
        _, copy, portals = self._nodes[i * n + j]
        for node in (copy, *reversed(portals)):
            self._transfer(node, back=True)
            yield
            source = node.source
            agenda.wait(own[source], own[j])
            self._came[i * n + source] += 1
            if self._waits[source] == i and self._came[i * n + source] == self._awaits[source]:
                self._waits[source] = _NOBODY
                agenda.enter(self._threads[source])
