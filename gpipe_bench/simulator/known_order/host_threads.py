"""Host threads whose order of issue is known beforehand, one turn after the other.

With clock-cycles, Fork and Join, copy streams and a device per partition no host thread has a choice, with or without
skips; what is open is when its turn comes, and with it what is on a copy stream that it shares with another thread:

    calling thread   of a cycle (i,j): portals into j, copy j-1 -> j; hands the tasks to the workers; collects them
    worker j         F(i,j)
    thread j         R(i,j)   B(i,j)   gradient j -> j-1   gradients of the skips that came, the last one first

A gradient's copy leads on to the stream of its receiver, of which another thread may have got hold in the meantime.
Between any two of these, thread j runs Join (i,j+1) when the gradient of (i,j+1) has been sent, unless its number is
the lower one. Thread j+1 waits for that before it begins with (i-1,j+1).
"""

from __future__ import annotations

from array import array
from typing import Final

from gpipe_bench.schedule import Cycle, checkpoint_stop, clock_cycles
from gpipe_bench.simulator.host.settings import Settings
from gpipe_bench.simulator.known_order.agenda import Agenda, Turns
from gpipe_bench.simulator.known_order.links import Links
from gpipe_bench.simulator.known_order.numbers import Numbers
from gpipe_bench.simulator.known_order.operations import Operations
from gpipe_bench.simulator.memory.memory import Memory
from gpipe_bench.simulator.virtual_time.graph import Node
from gpipe_bench.simulator.virtual_time.places import POOL, Places
from gpipe_bench.simulator.workloads.workload import Machine, Workload

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
        self._work, self._settings = workload, settings
        self._m, self._n = workload.m, workload.n
        devices = settings.devices or tuple(range(self._n))
        self._places = Places(devices, copy_streams=True, transfer="direct")
        slots = [[self._places.copying(i, j) for j in range(self._n)] for i in range(min(POOL, self._m))]
        self._copying = [slots[i % POOL] for i in range(self._m)]
        self._computing = self._places.computing
        self._again = checkpoint_stop(settings.checkpoint, self._m)
        self._early = settings.components.early_recompute
        self._sizes, sizes = workload.microbatch_sizes, {*workload.microbatch_sizes}
        links = Links(workload, machine, devices, in_order=in_order)
        self._arrivals, self._awaits = links.arrivals, links.awaits
        keys = [f"{kind} {skip.key}" for skip in links.crossing for kind in ("portal", "portal_grad")]
        self._kinds = ("forward", "recompute", "backward", "copy", "copy_grad", *keys)
        self._kernels = {
            kind: {size: [getattr(works[size], kind) for works in workload.partitions] for size in sizes}
            for kind in ("forward", "recompute", "backward")
        }
        self.agenda = Agenda(machine, Operations(links.engines, links.shared), len(self._places.device_of))
        self.memory: Memory | None = None
        if settings.memory:
            self.memory = Memory(
                workload, self._places, self.agenda, capacity=machine.capacity_bytes, riding=False, tally=settings.tally
            )
        self.steps: list[dict[str, array[int]]] = []
        self._now: dict[str, array[int]] = {}
        self.instants: list[list[tuple[int, int]]] = []
        self.held: list[tuple[list[tuple[int, ...]], list[tuple[int, ...]]]] = []
        tasks = ((i, j) for i in range(self._m) for j in range(self._n))
        self._nodes = [self._node(i, j) for i, j in tasks] if self.memory is not None else []
        self._caller = self._call()
        self._collecting = _NOBODY
        counts = [len(into) for into in self._arrivals[self._sizes[0]]]
        self._numbers = Numbers(workload, counts, again=self._again, early=self._early)
        # Of the backward pass: a thread of each device, whether it sleeps, and the micro-batch whose Join it is to run;
        # and how much each task still waits for.
        self._threads: list[Turns] = []
        self._asleep: list[bool] = []
        self._joining: list[int] = []
        self._missing: list[int] = []
        self.agenda.enter(self._caller)
        self.agenda.run()
        self.makespan = max(self.agenda.now, *self.agenda.operations.ends)

    def _node(self, i: int, j: int) -> tuple[Node, list[Node]]:
        """A task and what comes into it, as :class:`gpipe_bench.simulator.memory.memory.Memory` asks."""
        own, kind, device = self._copying[i], "checkpoint" if i < self._again else "task", self._places.devices[j]
        arrivals = []
        for one in self._arrivals[self._sizes[i]][j]:
            node = Node("copy" if one.key is None else "portal", (i, j), device, stream=own[j], peer=own[one.source])
            node.source, node.skip, node.nbytes, node.returned = one.source, one.key, one.nbytes, one.nbytes
            arrivals.append(node)
        node = Node(kind, (i, j), device, stream=self._computing[j], peer=self._computing[j])
        node.single |= not j and self._again > 0
        return node, arrivals

    def forget(self) -> None:
        """Let go of everything, which refers to each other in circles."""
        for part in (self.memory, self.agenda, self):
            if part is not None:
                vars(part).clear()

    # --- what threads issue --------------------------------------------------------------------------------------

    def _compute(self, kind: str, i: int, j: int) -> None:
        agenda, place, computing = self.agenda, i * self._n + j, self._computing[j]
        if self.memory is not None:
            node = self._nodes[place][0]
            agenda.passed()
            if kind == "backward":
                self.memory.backward(node)
            else:
                self.memory.forward(node, again=kind == "recompute")
            self._check(j)
        if kind == "backward":
            on_compute, on_copy = self.held[-1]
            on_compute[place], on_copy[place] = agenda.streams[computing], agenda.streams[self._copying[i][j]]
        self._now[kind][place] = agenda.compute(computing, self._kernels[kind][self._sizes[i]][j])

    def _transfer(self, i: int, j: int, which: int, *, back: bool) -> None:
        """Copy what comes into a task, or its gradients back."""
        agenda, memory, place, own = self.agenda, self.memory, i * self._n + j, self._copying[i]
        one = self._arrivals[self._sizes[i]][j][which]
        if memory is not None:
            agenda.passed()
            memory.transfer(self._nodes[place][1][which], back=back)
            self._check(one.source if back else j)
        if back:
            number = agenda.copy(own[j], own[one.source], *one.back, len(one.nbytes))
            self._now[one.kind_back][place] = number
        else:
            number = agenda.copy(own[one.source], own[j], *one.there, len(one.nbytes))
            self._now[one.kind][place] = number
        if memory is not None:
            memory.transferred()

    def _check(self, j: int) -> None:
        if self.memory is not None and self.memory.flushed(self._places.devices[j]):
            raise Flushed

    # --- the calling thread --------------------------------------------------------------------------------------

    def _call(self) -> Turns:
        agenda, memory, work = self.agenda, self.memory, self._work
        for step in range(self._settings.steps):
            tasks = self._m * self._n
            self._now = {kind: array("q", [_NOBODY]) * tasks for kind in self._kinds}
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
            # All but the last micro-batch wait for the Join of the next one, which the first device runs by itself.
            self._missing = [
                self._awaits[j] + (i + 1 < self._m and j > 0) for i in range(self._m) for j in range(self._n)
            ]
            self._joining, self._asleep = [_NOBODY] * self._n, [True] * self._n
            self._threads = [self._serve(j) for j in range(self._n)]
            self._wake(self._n - 1)
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
            for which in range(len(self._arrivals[self._sizes[i]][j])):
                self._transfer(i, j, which, back=False)
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
        agenda, n, computing, numbers = self.agenda, self._n, self._computing[j], self._numbers
        loss = self._work.loss
        if j == n - 1 and (loss.duration_ns or loss.launches):
            agenda.compute(computing, loss)
            yield
        for i in reversed(range(self._m)):
            place = i * n + j
            while self._missing[place]:
                if self._joining[j] == _NOBODY:
                    self._asleep[j] = True
                    yield
                else:
                    self._join(j)
            copying, again = self._copying[i][j], i < self._again
            if again and self._early:
                self._join_before(j, numbers.recomputes[place])
                self._compute("recompute", i, j)
                yield
            if j + 1 < n:
                agenda.wait(computing, copying)
            self._join_before(j, numbers.tasks[place])
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
        arrivals = self._arrivals[self._sizes[i]][j]
        for which in reversed(range(len(arrivals))):
            self._join_before(j, self._numbers.arrivals[i * n + j] + which)
            self._transfer(i, j, which, back=True)
            yield
            source = arrivals[which].source
            agenda.wait(own[source], own[j])
            if i and arrivals[which].key is None:
                self._joining[source] = i
                self._wake(source)
            else:
                self._come(i, source)

    def _join_before(self, j: int, number: int) -> None:
        """Run the Join that waits for a thread, if it comes before a node with that number."""
        i = self._joining[j]
        if i != _NOBODY and self._numbers.joins[i * self._n + j + 1] > number:
            self._join(j)

    def _join(self, j: int) -> None:
        """Run the Join that waits for a thread: it takes a gradient, and releases the Fork on the next device."""
        i, self._joining[j] = self._joining[j], _NOBODY
        self._missing[i * self._n + j] -= 1
        self._come(i - 1, j + 1)

    def _come(self, i: int, j: int) -> None:
        """One of the things has come that a task waits for."""
        self._missing[i * self._n + j] -= 1
        if not self._missing[i * self._n + j]:
            self._wake(j)

    def _wake(self, j: int) -> None:
        if self._asleep[j]:
            self._asleep[j] = False
            self.agenda.enter(self._threads[j])
