"""The race checker: which accesses to memory no wait orders.

A vector clock per stream counts the records that have run before. An event copies its stream's clock, a wait joins
it, a synchronisation joins it into the host's clock, and a launch joins the host's into the stream's. Then one access
happens before another exactly if the other's clock has counted it. Each block keeps, for spans of its bytes, the last
writes and the reads since then. Two more rules come from the caching allocator, which hands a freed block out again on
the stream that allocated it, while the streams may still be busy:

- An allocation counts as a write on its stream: a kernel that used that memory before may still run there.
- When a block is freed, every other stream that used it must have been recorded (``record_stream``), or the block's
  own stream must have waited for that use before it gets the next block, which may be the same memory.

One rule is about time rather than data. A copy between devices begins when its sender and its receiver have both come
to it, and one that is staged through host memory must do the same:

- Before the sender's half begins, its stream must have waited for what the receiver's stream had been given when the
  host thread last did something else.

Limits: the host counts as one thread, so what its threads do is taken as ordered as it happened, which can hide a race
and cannot invent one. A tensor with gaps counts as the bytes from its first to its last. Memory of the CPU is seen only
where a copy reads or writes pinned memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

from gpipe_bench.machine.trace import HOST, Record

Queue = tuple[int, int]
Clock = dict[Queue, int]
ByteRange = tuple[int, int]

_WHOLE: Final = (0, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class Race:
    """Two accesses to a block that nothing orders.

    Attributes:
        kind: ``read``: the memory may not be written yet. ``write``: its old content may still be in use. ``free``:
            another stream may still use it. ``transfer``: the copy may begin before its receiver is ready.
        block: the memory.
        before: the access that may come too late.
        after: the one that may come too early.
    """

    kind: str
    block: int
    before: Record
    after: Record

    def __str__(self) -> str:
        return f"{self.kind} of block {self.block}: {self.after} does not wait for {self.before}"


class _Access(NamedTuple):
    queue: Queue
    time: int
    record: Record


@dataclass(slots=True)
class _Block:
    queue: Queue
    writes: dict[ByteRange, _Access] = field(default_factory=dict)
    reads: dict[tuple[Queue, ByteRange], _Access] = field(default_factory=dict)
    uses: dict[Queue, _Access] = field(default_factory=dict)
    recorded: set[Queue] = field(default_factory=set)


class _Sent(NamedTuple):
    """The sender's half of a staged copy, with the clock of its stream; the ``number``-th launch of all."""

    number: int
    access: _Access
    clock: Clock


def find_races(records: Iterable[Record]) -> list[Race]:
    """All races of a trace, one per pair of accesses."""
    checker = _Checker()
    for record in records:
        if check := getattr(checker, record.kind, None):
            check(record)
    return checker.races


class _Checker:
    def __init__(self) -> None:
        self.races: list[Race] = []
        self.clocks: dict[Queue, Clock] = {}
        self.host: Clock = {}
        # How often the host has synchronised, and what of that a stream has seen.
        self.host_version = 0
        self.seen: dict[Queue, int] = {}
        self.versions: dict[int, Clock] = {}
        self.blocks: dict[int, _Block] = {}
        # Blocks freed since a stream's last allocation, with uses on other streams for which record_stream is missing.
        self.freed: defaultdict[Queue, list[tuple[int, _Access, Record]]] = defaultdict(list)
        self.transfers = _Transfers()

    def kernel(self, record: Record) -> None:
        clock = self.launch(record.queue)
        access = _Access(record.queue, clock[record.queue], record)
        self.races += self.transfers.launched(access, clock)
        spans = record.spans or (_WHOLE,) * (len(record.reads) + len(record.writes))
        written = tuple(zip(record.writes, spans[len(record.reads) :], strict=True))
        for block, span in zip(record.reads, spans, strict=False):
            # Who writes must wait for whatever who reads must.
            if (block, span) not in written:
                self.read(block, span, access, clock)
        for block, span in written:
            self.write(block, span, access, clock)

    copy = kernel
    meet = kernel

    def record(self, record: Record) -> None:
        self.versions[record.version] = dict(self.launch(record.queue))

    def wait(self, record: Record) -> None:
        _join(self.launch(record.queue), self.versions.get(record.version, {}))

    def sync_stream(self, record: Record) -> None:
        self.host_joins(self.clocks.get(record.queue, {}))

    def sync_device(self, record: Record) -> None:
        for queue, clock in self.clocks.items():
            if queue[0] == record.device:
                self.host_joins(clock)

    def sync_event(self, record: Record) -> None:
        self.host_joins(self.versions.get(record.version, {}))

    def alloc(self, record: Record) -> None:
        (block,) = record.writes
        self.blocks[block] = _Block(record.queue)
        if record.device != HOST:
            clock = self.launch(record.queue)
            self.blocks[block].writes[0, record.nbytes] = _Access(record.queue, clock[record.queue], record)
            for freed, use, at in self.freed.pop(record.queue, ()):
                if clock.get(use.queue, 0) < use.time:
                    self.races.append(Race("free", freed, use.record, at))

    def free(self, record: Record) -> None:
        (block,) = record.writes
        known = self.blocks.pop(block, None)
        if known is None or record.device == HOST:
            return
        for queue, use in known.uses.items():
            if queue != known.queue and queue not in known.recorded:
                self.freed[known.queue].append((block, use, record))

    def record_stream(self, record: Record) -> None:
        (block,) = record.writes
        self.of(block, record).recorded.add(record.queue)

    def read(self, block: int, span: ByteRange, access: _Access, clock: Clock) -> None:
        known = self.of(block, access.record)
        self.expect("read", block, known.writes.items(), span, access, clock)
        known.reads[access.queue, span] = known.uses[access.queue] = access

    def write(self, block: int, span: ByteRange, access: _Access, clock: Clock) -> None:
        known = self.of(block, access.record)
        self.expect("write", block, known.writes.items(), span, access, clock)
        reads = ((other, earlier) for (_, other), earlier in known.reads.items())
        self.expect("write", block, reads, span, access, clock)
        known.writes = {other: earlier for other, earlier in known.writes.items() if not _covers(span, other)}
        known.reads = {key: earlier for key, earlier in known.reads.items() if not _covers(span, key[1])}
        known.writes[span] = known.uses[access.queue] = access

    def expect(  # noqa: PLR0917 - two sides, and where they meet
        self,
        kind: str,
        block: int,
        before: Iterable[tuple[ByteRange, _Access]],
        span: ByteRange,
        access: _Access,
        clock: Clock,
    ) -> None:
        """Those ``before`` that overlap must have been counted by the clock of ``access``."""
        for other, earlier in before:
            if other[0] < span[1] and span[0] < other[1] and clock.get(earlier.queue, 0) < earlier.time:
                self.races.append(Race(kind, block, earlier.record, access.record))

    def of(self, block: int, record: Record) -> _Block:
        """The record of a block. A block from before the trace begins with its first user, which waits for nothing."""
        known = self.blocks.get(block)
        if known is None:
            known = self.blocks[block] = _Block(record.queue)
        return known

    def launch(self, queue: Queue) -> Clock:
        """The clock of a stream, for a record that the host launches now."""
        clock = self.clocks.setdefault(queue, {queue: 0})
        if self.seen.get(queue, 0) < self.host_version:
            _join(clock, self.host)
            self.seen[queue] = self.host_version
        clock[queue] += 1
        return clock

    def host_joins(self, clock: Clock) -> None:
        _join(self.host, clock)
        self.host_version += 1


def _covers(span: ByteRange, other: ByteRange) -> bool:
    return span[0] <= other[0] and other[1] <= span[1]


def _join(clock: Clock, other: Clock) -> None:
    for queue, time in other.items():
        if clock.get(queue, 0) < time:
            clock[queue] = time


class _Transfers:
    """Copies staged through host memory: from a device to a block there, and from that block to a device."""

    def __init__(self) -> None:
        self.count = 0
        # Launches by their numbers.
        self.of_thread: defaultdict[int, list[int]] = defaultdict(list)
        self.of_queue: defaultdict[Queue, list[tuple[int, _Access]]] = defaultdict(list)
        self.staged: dict[int, _Sent] = {}
        # Streams of sender and receiver, of each half of a staged copy.
        self.pairs: dict[int, tuple[Queue, Queue]] = {}

    def launched(self, access: _Access, clock: Clock) -> list[Race]:
        """The races that an access adds: one if it is the receiver's half and the sender's half did not wait."""
        number, record = self.count, access.record
        self.count += 1
        races = []
        if record.name == "device_to_host":
            self.staged.update(dict.fromkeys(record.writes, _Sent(number, access, dict(clock))))
        for block in record.reads if record.name == "host_to_device" else ():
            if block in self.staged:
                sent = self.staged.pop(block)
                self.pairs[sent.number] = self.pairs[number] = sent.access.queue, access.queue
                races += self.early(block, sent)
        self.of_thread[record.thread].append(number)
        self.of_queue[access.queue].append((number, access))
        return races

    def early(self, block: int, sent: _Sent) -> list[Race]:
        """The receiver's last work that the sender's half should have waited for, if it did not."""
        pair = self.pairs[sent.number]
        thread = self.of_thread[sent.access.record.thread]
        # Other tensors of the same transfer share its barrier.
        others = (number for number in reversed(thread) if self.pairs.get(number) != pair)
        since = next((number for number in others if number < sent.number), -1)
        given = self.of_queue[pair[1]]
        known = bisect_right(given, since, key=itemgetter(0))
        if known == 0 or pair[0] == pair[1]:
            return []
        _, last = given[known - 1]
        if sent.clock.get(last.queue, 0) >= last.time:
            return []
        return [Race("transfer", block, last.record, sent.access.record)]
