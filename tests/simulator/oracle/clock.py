"""Virtual time: streams, engines and host threads on one clock that counts nanoseconds.

    stream      runs what was issued to it in order; an operation may belong to two streams, which is the two-way
                barrier of a copy between devices: it begins when both have come to it, and both go on when it ends
    engine      a device computes one thing at a time; what leaves a device and what comes to it take turns too. Of
                several operations that are ready for an engine, the one that became ready first runs first, then the
                one issued first; at one time, the one of the lower device, then of the lower stream
    host        threads are generators: ``yield t`` goes on at time t, ``yield None`` when somebody calls ``resume``

Whatever happens at one time is over before an engine is given away, so results hang on no order but that of issue.
The loop of the agenda and what it calls do without helpers: a simulation comes by there hundreds of thousands of times.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

from tests.simulator.oracle.streams import Event, Operation, Stream, Thread, follow

__all__ = ["Clock"]


class Clock:
    """Runs operations and host threads.

    Args:
        streams: how many streams there are.
        engines: how many engines.
        queue_depth: launches that a stream holds; 0 for no limit.
        device_of: the device of each stream; by default all are of one.

    Attributes:
        now: the present.
        streams: by number.
        current: the host thread that runs.
    """

    current: Thread

    def __init__(
        self, streams: int, engines: int, queue_depth: int = 0, device_of: Sequence[int] | None = None
    ) -> None:
        self.now = 0
        self.streams = [Stream() for _ in range(streams)]
        self._device_of = device_of or [0] * streams
        self._depth = queue_depth
        self._occupied = [False] * engines
        self._waiting: list[list[Operation]] = [[] for _ in range(engines)]
        self._ready: list[Operation] = []
        # (time, order of entry, operation that ends or thread that goes on)
        self._agenda: list[tuple[int, int, Operation | Thread]] = []
        self._entries = 0
        self._operations = 0

    # --- what host threads do ------------------------------------------------------------------------------------

    def wait(self, waiter: int, awaited: int) -> None:
        """What is issued to ``waiter`` from now on begins after everything issued to ``awaited`` so far."""
        if waiter == awaited:
            return
        pending = self.streams[awaited].pending()
        if pending:
            target = self.streams[waiter]
            known = target.pending()
            target.awaited = known + [one for one in pending if one not in known]
            # The tail is among them.
            target.tail = None

    def add_engine(self) -> int:
        """Add an engine; gives its number."""
        self._occupied.append(False)
        self._waiting.append([])
        return len(self._occupied) - 1

    def issue(
        self, streams: tuple[int, ...], duration: int, *, engines: tuple[int, ...], launches: int, host_ns: int
    ) -> Operation:
        """Issue an operation to a stream, or to two that meet in it; the first is the one that holds its launches."""
        self._operations += 1
        turn = self.now, self._device_of[streams[0]], streams[0], self._operations
        operation = Operation(turn, duration, launches, engines, self.now + host_ns)
        missing = 0
        for number in streams:
            stream = self.streams[number]
            tail = stream.tail
            if tail is not None and tail.end < 0:
                missing += follow(tail, operation)
            if stream.awaited:
                for awaited in stream.awaited:
                    if awaited.end < 0:
                        missing += follow(awaited, operation)
                stream.awaited = []
            stream.tail = operation
        if self._depth and launches:
            first = self.streams[streams[0]]
            first.queued.append((first.launched, operation))
            first.launched += launches
        operation.missing = missing
        if not missing:
            operation.ready = self.now
            self._ready.append(operation)
        return operation

    def record(self, number: int, event: Event) -> None:
        """Let ``event`` pass when everything issued to a stream so far has run."""
        stream = self.streams[number]
        tail = stream.tail
        if not stream.awaited and (tail is None or tail.end >= 0):
            event.passed.append(event)
            return
        for operation in stream.pending():
            if operation.followers is None:
                operation.followers = []
            operation.followers.append(event)
            event.missing += 1
        if not event.missing:
            event.passed.append(event)

    def idle(self, number: int) -> bool:
        """Whether everything issued to a stream so far has run."""
        return not self.streams[number].pending()

    def full_until(self, number: int) -> int | Operation:
        """When the launch queue of a stream has room for all that was issued, or what must start to know that."""
        stream = self.streams[number]
        excess = stream.launched - self._depth
        if not self._depth or excess <= 0:
            return self.now
        queued = stream.queued
        while queued[0][0] + queued[0][1].launches < excess:
            queued.popleft()
        before, operation = queued[0]
        if operation.start < 0:
            return operation
        return operation.start + -(-operation.duration * (excess - before) // operation.launches)

    def after_start(self, operation: Operation, thread: Thread) -> None:
        """Resume ``thread`` when ``operation`` starts."""
        if operation.starters is None:
            operation.starters = []
        operation.starters.append(thread)

    def resume(self, thread: Thread, at: int | None = None) -> None:
        """Let ``thread`` go on, now or later."""
        self._entries += 1
        heappush(self._agenda, (self.now if at is None else at, self._entries, thread))

    # --- time ----------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Run until nothing is left to do.

        Returns:
            The end of the last event.
        """
        agenda = self._agenda
        while True:
            if self._ready and (not agenda or agenda[0][0] > self.now):
                self._settle()
            elif not agenda:
                return self.now
            now, _, subject = heappop(agenda)
            self.now = now
            if isinstance(subject, Operation):
                self._finish(subject, now)
                continue
            self.current = subject
            until = next(subject, None)
            if until is not None:
                self._entries += 1
                heappush(agenda, (until, self._entries, subject))

    def _settle(self) -> None:
        """Start what is ready where engines are free: first come, first served, then in their turn."""
        ready, self._ready = self._ready, []
        if len(ready) > 1:
            ready.sort(key=_turn)
        now, occupied, waiting = self.now, self._occupied, self._waiting
        for operation in ready:
            end = now + operation.duration
            if end > now:
                # It occupies its engines if all are free; else it waits for all of them.
                engines = operation.engines
                if any(map(occupied.__getitem__, engines)):
                    for engine in engines:
                        waiting[engine].append(operation)
                    continue
                for engine in engines:
                    occupied[engine] = True
            operation.start = now
            self._entries += 1
            heappush(self._agenda, (max(end, operation.issued), self._entries, operation))
            if operation.starters is not None:
                for thread in operation.starters:
                    self.resume(thread)
                operation.starters = None

    def _finish(self, operation: Operation, now: int) -> None:
        operation.end = now
        if operation.followers is not None:
            for follower in operation.followers:
                follower.missing -= 1
                if follower.missing:
                    continue
                if isinstance(follower, Operation):
                    follower.ready = now
                    self._ready.append(follower)
                else:
                    follower.passed.append(follower)
            operation.followers = None
        if operation.duration:
            occupied, waiting = self._occupied, self._waiting
            for engine in operation.engines:
                occupied[engine] = False
                if waiting[engine]:
                    self._wake(engine)

    def _wake(self, engine: int) -> None:
        """Whoever waits for ``engine`` may try again."""
        waiting = self._waiting[engine]
        for operation in waiting:
            for other in operation.engines:
                if other != engine:
                    self._waiting[other].remove(operation)
        self._ready += waiting
        waiting.clear()


def _turn(operation: Operation) -> tuple[int, tuple[int, ...]]:
    return operation.ready, operation.turn
