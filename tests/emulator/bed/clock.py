"""Virtual time: when a trace would have run on devices that work at the same time.

Each stream runs its records in order. A device has one compute engine: a kernel occupies it, and of several that are
ready the one that became ready first goes first, then the one issued first. Kernels that take no time do not wait for
it. Copies occupy nothing but their stream (links and copy engines are never contended), and the barriers that a copy
between devices issues tie the receiver's stream to it. Launching costs the host nothing, so it runs ahead, until it
synchronises: whatever it issues after that, in any thread, starts later.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpipe_bench.emulator.library import elapsed_by
from gpipe_bench.emulator.trace import Record, Trace, recording

__all__ = ["Durations", "Timeline", "simulate", "ticking"]

Durations = Mapping[str, float] | Callable[[Record], float]
"""Milliseconds by operator name, 0 for names that it lacks, or a function of the record. A duration that the host
thread gave (``with duration(10):``) comes first."""

Queue = tuple[int, int]
# The clock counts nanoseconds, so that what happens at one time is not torn apart by rounding.
TICKS_PER_MS = 1_000_000


@dataclass(frozen=True)
class Timeline:
    """When each record ran, in milliseconds.

    Attributes:
        begin: by index in the trace; -1 for records that do not run on a stream.
        end: the same.
        versions: when each event version was recorded.
    """

    begin: list[float]
    end: list[float]
    versions: dict[int, float]

    @property
    def makespan(self) -> float:
        """When the last record ended."""
        return max(self.end, default=0.0)


def simulate(records: Sequence[Record], durations: Durations | None = None) -> Timeline:
    """Run a trace in virtual time."""
    return _Run(records, durations or {}).finish()


@contextmanager
def ticking(durations: Durations | None = None) -> Iterator[Trace]:
    """Record the block; ``elapsed_time`` of its timing events is virtual time."""
    with recording() as trace:
        latest: dict[int, Timeline] = {}

        def elapsed(one: int, other: int) -> float:
            count = len(trace.records)
            if count not in latest:
                latest.clear()
                latest[count] = simulate(trace.records, durations)
            versions = latest[count].versions
            return versions[other] - versions[one]

        with elapsed_by(elapsed):
            yield trace


@dataclass
class _Stream:
    waiting: deque[int] = field(default_factory=deque)
    busy: bool = False
    ready_since: int = 0


class _Run:
    def __init__(self, records: Sequence[Record], durations: Durations) -> None:
        self.records = records
        self.durations = durations
        self.now = 0
        self.issued = 0
        self.streams: dict[Queue, _Stream] = {}
        # (end, index) of what runs; per device what occupies the engine, and who waits for it
        self.running: list[tuple[int, int]] = []
        self.occupied: set[int] = set()
        self.contenders: dict[int, list[tuple[int, int]]] = {}
        self.awaiting: dict[int, list[Queue]] = {}
        self.known = {record.version for record in records if record.kind == "record"}
        self.timeline = Timeline([-1.0] * len(records), [-1.0] * len(records), {})

    def finish(self) -> Timeline:
        while True:
            self.host()
            if not self.running:
                break
            self.now, index = heapq.heappop(self.running)
            self.done(index)
            while self.running and self.running[0][0] == self.now:
                self.done(heapq.heappop(self.running)[1])
        assert self.issued == len(self.records), f"nothing runs, but {self.records[self.issued]} was not issued"
        return self.timeline

    def host(self) -> None:
        """Issue records until one waits."""
        while self.issued < len(self.records):
            self.settle()
            record = self.records[self.issued]
            if self.blocks(record):
                return
            if record.kind in ("kernel", "copy", "record", "wait"):
                stream = self.streams.setdefault(record.queue, _Stream())
                if not stream.waiting:
                    stream.ready_since = self.now
                stream.waiting.append(self.issued)
                self.issued += 1
                self.advance(record.queue)
            else:
                self.issued += 1
        self.settle()

    def blocks(self, record: Record) -> bool:
        """Whether the host waits at ``record``."""
        if record.kind == "sync_event":
            return record.version in self.known and record.version not in self.timeline.versions
        if record.kind == "sync_stream":
            return self.unfinished(record.queue)
        if record.kind == "sync_device":
            return any(self.unfinished(queue) for queue in self.streams if queue[0] == record.device)
        return False

    def unfinished(self, queue: Queue) -> bool:
        stream = self.streams.get(queue)
        return stream is not None and (stream.busy or bool(stream.waiting))

    def advance(self, queue: Queue) -> None:
        """Run what can run at the head of a stream."""
        stream = self.streams[queue]
        while stream.waiting and not stream.busy:
            index = stream.waiting[0]
            record = self.records[index]
            if record.kind == "wait" and record.version in self.known and record.version not in self.timeline.versions:
                self.awaiting.setdefault(record.version, []).append(queue)
                return
            length = self.length(record)
            if record.kind == "kernel" and length > 0:
                # The engine decides once everybody who is ready at this moment has spoken.
                self.contenders.setdefault(record.device, []).append((stream.ready_since, index))
                stream.busy = True
                return
            if length > 0:
                stream.busy = True
                self.start(index, length)
                return
            self.timeline.begin[index] = self.timeline.end[index] = self.now / TICKS_PER_MS
            self.next(stream)
            if record.kind == "record":
                self.timeline.versions[record.version] = self.now / TICKS_PER_MS
                for waiter in self.awaiting.pop(record.version, ()):
                    self.streams[waiter].ready_since = self.now
                    self.advance(waiter)

    def settle(self) -> None:
        """Give idle engines to those who were ready first."""
        for device, contenders in self.contenders.items():
            if contenders and device not in self.occupied:
                first = min(contenders)
                contenders.remove(first)
                self.occupied.add(device)
                self.start(first[1], self.length(self.records[first[1]]))

    def start(self, index: int, length: int) -> None:
        self.timeline.begin[index] = self.now / TICKS_PER_MS
        self.timeline.end[index] = (self.now + length) / TICKS_PER_MS
        heapq.heappush(self.running, (self.now + length, index))

    def done(self, index: int) -> None:
        record = self.records[index]
        stream = self.streams[record.queue]
        stream.busy = False
        if record.kind == "kernel":
            self.occupied.discard(record.device)
        self.next(stream)
        self.advance(record.queue)

    def next(self, stream: _Stream) -> None:
        stream.waiting.popleft()
        stream.ready_since = self.now

    def length(self, record: Record) -> int:
        if record.kind not in ("kernel", "copy"):
            return 0
        if record.duration is not None:
            given = record.duration
        elif callable(self.durations):
            given = self.durations(record)
        else:
            given = self.durations.get(record.name, 0.0)
        return round(given * TICKS_PER_MS)
