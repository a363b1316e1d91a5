"""The agenda of host threads whose order of issue is known: who goes on when, and what their streams wait for.

It has turns of threads, and copies that share engines. A turn is its time, when it was entered, see
:mod:`gpipe_bench.simulator.known_order.turns`, and its place among those that were entered together: that of the turn
that entered it, or of the operation whose start it awaited.
"""

from __future__ import annotations

from array import array
from collections.abc import Generator
from heapq import heappop, heappush

from gpipe_bench.simulator.known_order.operations import Operations
from gpipe_bench.simulator.virtual_time.streams import Event
from gpipe_bench.simulator.workloads.workload import Kernels, Machine

__all__ = ["Agenda", "Turns"]

Turns = Generator[None, None, None]
"""A thread: it yields when it has entered its next turn, or when another one will."""


class Agenda:
    """Runs threads and operations; also tells allocators what has run.

    Args:
        machine: what launches cost.
        operations: what threads issue.
        streams: how many there are; those of computations come first.

    Attributes:
        operations: all that ran.
        issues: time of issue of each operation.
        entries: entry of the turn in which it was issued.
        streams: what the next operation of each stream waits for.
        now: the time of the turn.
        current: the thread whose turn it is.
    """

    current: Turns

    def __init__(self, machine: Machine, operations: Operations, streams: int) -> None:
        self.operations = operations
        self.issues, self.entries = array("q"), array("q")
        self.streams: list[tuple[int, ...]] = [()] * streams
        self.now = 0
        self._host_ns, self._depth = machine.launch_ns, machine.queue_depth
        # Entry of the turn, and its place among those of one time and entry.
        self._entry = self._place = self._count = 0
        self._turns: list[tuple[int, int, int, int, Turns]] = []
        # Of each compute stream, (launches before, launches, duration, number) of what may fill its queue; the first
        # of these that counts; and all launches.
        self._queued: list[list[tuple[int, int, int, int]]] = [[] for _ in range(streams)]
        self._heads, self._launched = [0] * streams, [0] * streams
        # Whoever waits for a start: (thread, when it goes on at the earliest, what it makes room for).
        self._blocked: dict[int, list[tuple[Turns, int, int]]] = {}
        # Events by the operations that they wait for, and (end, entry, number) of those that are known.
        self._events: dict[int, list[Event]] = {}
        self._ending: list[tuple[int, int, int]] = []

    @property
    def turn(self) -> tuple[int, int]:
        """Time and entry of the turn."""
        return self.now, self._entry

    # --- what threads do -----------------------------------------------------------------------------------------

    def enter(self, thread: Turns) -> None:
        """Let a thread go on now, after those that were entered before."""
        self._enter(thread, self.now)

    def wait(self, waiter: int, awaited: int) -> None:
        """What is issued to ``waiter`` from now on begins after everything issued to ``awaited`` so far."""
        own, more = self.streams[waiter], self.streams[awaited]
        if len(more) == 1:
            if more[0] not in own:
                self.streams[waiter] = own + more
        elif own != more:
            self.streams[waiter] = own + tuple([one for one in more if one not in own])

    def compute(self, stream: int, kernels: Kernels) -> int:
        """Issue kernels, and enter the turn in which the thread goes on."""
        now, launches, duration = self.now, kernels.launches, kernels.duration_ns
        done = now + self._host_ns * launches
        number = self.operations.issue(now, self.streams[stream], duration, done)
        self.issues.append(now)
        self.entries.append(self._entry)
        self.streams[stream] = (number,)
        before = self._launched[stream]
        self._launched[stream] = after = before + launches
        queued = self._queued[stream]
        if launches:
            queued.append((before, launches, duration, number))
        excess = after - self._depth
        if not self._depth or excess <= 0:
            self._enter(self.current, done)
            return number
        head = self._heads[stream]
        before, launches, duration, awaited = queued[head]
        while before + launches < excess:
            head += 1
            before, launches, duration, awaited = queued[head]
        self._heads[stream] = head
        left = -(-duration * (excess - before) // launches)
        start = self.operations.starts[awaited]
        if start < 0:
            self.operations.awaited.add(awaited)
            self._blocked.setdefault(awaited, []).append((self.current, done, left))
        elif start > now or (start == now and self._entry <= 2 * start):
            self._resume(self.current, max(start + left, done), awaited)
        else:
            self._enter(self.current, max(start + left, done))
        return number

    def copy(self, first: int, second: int, link: int, length: int, tensors: int) -> int:
        """Issue a copy from one stream to another, and enter the turn in which the thread goes on."""
        before, more = self.streams[first], self.streams[second]
        if more != before:
            before += more
        done = self.now + self._host_ns * tensors
        number = self.operations.issue(self.now, before, length, done, link)
        self.issues.append(self.now)
        self.entries.append(self._entry)
        self.streams[first] = self.streams[second] = (number,)
        self._enter(self.current, done)
        return number

    def _enter(self, thread: Turns, time: int) -> None:
        now = self.now
        entry = 2 * now
        self._count = place = self._count + 1
        if self._entry == entry + 1:
            # What comes after a start stays there.
            entry, place = entry + 1, self._place
        heappush(self._turns, (time, entry, place, self._count, thread))

    def _resume(self, thread: Turns, time: int, awaited: int) -> None:
        """Enter the turn of a thread that awaits a start."""
        self._count += 1
        heappush(self._turns, (time, 2 * self.operations.starts[awaited] + 1, awaited, self._count, thread))

    # --- time ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until nothing is left to do."""
        turns, copies, known = self._turns, self.operations.agenda, self.operations.known
        settle = self.operations.settle
        while turns or copies:
            if copies:
                time = copies[0][0]
                if not turns or turns[0][0] > time or (turns[0][0] == time and turns[0][1] > 2 * time):
                    settle()
                    if known:
                        for number in known:
                            self._started(number)
                        known.clear()
                    continue
            self.now, self._entry, self._place, _, self.current = heappop(turns)
            next(self.current, None)

    def _started(self, number: int) -> None:
        start = self.operations.starts[number]
        for thread, done, left in self._blocked.pop(number, ()):
            self._resume(thread, max(start + left, done), number)
        if number in self._events:
            heappush(self._ending, (self.operations.ends[number], 2 * start, number))

    # --- what allocators ask -------------------------------------------------------------------------------------

    def passed(self) -> None:
        """Let all events pass whose operations have ended before this turn."""
        ending, turn = self._ending, (self.now, self._entry)
        while ending and ending[0] < turn:
            for event in self._events.pop(heappop(ending)[2]):
                event.missing -= 1
                if not event.missing:
                    event.passed.append(event)

    def record(self, number: int, event: Event) -> None:
        """Let ``event`` pass when everything issued to a stream so far has run."""
        for one in self.streams[number]:
            if self._over(one):
                continue
            event.missing += 1
            events = self._events.get(one)
            if events is None:
                events = self._events[one] = []
                if self.operations.ends[one] < 0:
                    self.operations.awaited.add(one)
                else:
                    heappush(self._ending, (self.operations.ends[one], 2 * self.operations.starts[one], one))
            events.append(event)
        if not event.missing:
            event.passed.append(event)

    def idle(self, number: int) -> bool:
        """Whether everything issued to a stream so far has run."""
        return all(map(self._over, self.streams[number]))

    def _over(self, number: int) -> bool:
        end = self.operations.ends[number]
        if end != self.now:
            return 0 <= end < self.now
        return 2 * self.operations.starts[number] < self._entry
