"""The race checker: which accesses to memory no wait orders.

One access happens before another exactly if the other's clock has counted it; :mod:`gpipe_bench.emulator.clocks` has
the clocks. Each block keeps, for spans of its bytes, the last writes and the reads since then. Two more rules come from
the caching allocator, which hands a freed block out again on the stream that allocated it, while the streams may still
be busy:

- An allocation counts as a write on its stream: a kernel that used that memory before may still run there.
- When a block is freed, every other stream that used it must have been recorded (``record_stream``), or the block's
  own stream must have waited for that use before it gets the next block, which may be the same memory.

One rule is about time rather than data. A copy between devices begins when its sender and its receiver have both come
to it, and one that is staged through host memory must do the same:

- Before the sender's half begins, its stream must have waited for what the receiver's stream had been given when the
  host thread last did something else.

Each rank has memory of its own, so both accesses of a race are of one rank. What orders them may go through others.

Limits: the host of a rank counts as one thread, so what its threads do is taken as ordered as it happened, which can
hide a race and cannot invent one. A tensor with gaps counts as the bytes from its first to its last. Memory of the CPU
is seen only where a copy reads or writes pinned memory. Where ranks wait for each other for ever, races are those until
there.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Final, NamedTuple

from gpipe_bench.emulator.clocks import Clocks, Moment, Queue
from gpipe_bench.machine.trace import HOST, Record

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
    stream: int
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
    """The sender's half of a staged copy, and when it runs; the ``number``-th launch of all."""

    number: int
    access: _Access
    moment: Moment


def find_races(records: Iterable[Record]) -> list[Race]:
    """All races of the trace of one process, one per pair of accesses."""
    ranks = [list(records)]
    return find_rank_races(ranks, Clocks(ranks))


def find_rank_races(ranks: Sequence[Sequence[Record]], clocks: Clocks) -> list[Race]:
    """All races of several ranks, one per pair of accesses, rank by rank.

    Args:
        ranks: the records of each, as :func:`gpipe_bench.emulator.torchrun.merged` numbers them.
        clocks: theirs.
    """
    races: list[Race] = []
    for records, moments in zip(ranks, clocks.moments, strict=True):
        checker = _Checker(races)
        for record, moment in zip(records, moments, strict=True):
            checker.check(record, moment)
    return races


class _Checker:
    """Goes through the records of a rank in the order of their launch."""

    def __init__(self, races: list[Race]) -> None:
        self.races = races
        self.blocks: dict[int, _Block] = {}
        # Blocks freed since a stream's last allocation, with uses on other streams for which record_stream is missing.
        self.freed: defaultdict[Queue, list[tuple[int, _Access, Record]]] = defaultdict(list)
        self.transfers = _Transfers()

    def check(self, record: Record, moment: Moment | None) -> None:
        if record.kind == "alloc":
            self.alloc(record, moment)
        elif record.kind == "free":
            self.free(record)
        elif record.kind == "record_stream":
            (block,) = record.writes
            self.of(block, record).recorded.add(record.queue)
        elif record.kind in {"kernel", "copy", "meet"} and moment:
            self.work(record, moment)

    def work(self, record: Record, moment: Moment) -> None:
        reads = _Access(record.queue, moment.stream, moment.read_time, record)
        writes = reads._replace(time=moment.time)
        self.races += self.transfers.launched(writes, moment)
        spans = record.spans or (_WHOLE,) * (len(record.reads) + len(record.writes))
        written = tuple(zip(record.writes, spans[len(record.reads) :], strict=True))
        for block, span in zip(record.reads, spans, strict=False):
            # Who writes must wait for whatever who reads must.
            if (block, span) not in written:
                self.read(block, span, reads, moment)
        for block, span in written:
            self.write(block, span, writes, moment)

    def alloc(self, record: Record, moment: Moment | None) -> None:
        (block,) = record.writes
        self.blocks[block] = _Block(record.queue)
        if moment:
            access = _Access(record.queue, moment.stream, moment.time, record)
            self.blocks[block].writes[0, record.nbytes] = access
            for freed, use, at in self.freed.pop(record.queue, ()):
                if not moment.follows(use.stream, use.time):
                    self.races.append(Race("free", freed, use.record, at))

    def free(self, record: Record) -> None:
        (block,) = record.writes
        known = self.blocks.pop(block, None)
        if known is None or record.device == HOST:
            return
        for queue, use in known.uses.items():
            if queue != known.queue and queue not in known.recorded:
                self.freed[known.queue].append((block, use, record))

    def read(self, block: int, span: ByteRange, access: _Access, moment: Moment) -> None:
        known = self.of(block, access.record)
        self.expect("read", block, known.writes.items(), span, access, moment)
        known.reads[access.queue, span] = known.uses[access.queue] = access

    def write(self, block: int, span: ByteRange, access: _Access, moment: Moment) -> None:
        known = self.of(block, access.record)
        self.expect("write", block, known.writes.items(), span, access, moment)
        reads = ((other, earlier) for (_, other), earlier in known.reads.items())
        self.expect("write", block, reads, span, access, moment)
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
        moment: Moment,
    ) -> None:
        """Those ``before`` that overlap must have been counted by the clock of ``access``."""
        for other, earlier in before:
            overlaps = other[0] < span[1] and span[0] < other[1]
            if overlaps and not moment.follows(earlier.stream, earlier.time, writing=kind == "write"):
                self.races.append(Race(kind, block, earlier.record, access.record))

    def of(self, block: int, record: Record) -> _Block:
        """The record of a block. A block from before the trace begins with its first user, which waits for nothing."""
        known = self.blocks.get(block)
        if known is None:
            known = self.blocks[block] = _Block(record.queue)
        return known


def _covers(span: ByteRange, other: ByteRange) -> bool:
    return span[0] <= other[0] and other[1] <= span[1]


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

    def launched(self, access: _Access, moment: Moment) -> list[Race]:
        """The races that an access adds: one if it is the receiver's half and the sender's half did not wait."""
        number, record = self.count, access.record
        self.count += 1
        races = []
        if record.name == "device_to_host":
            self.staged.update(dict.fromkeys(record.writes, _Sent(number, access, moment)))
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
        if sent.moment.follows(last.stream, last.time):
            return []
        return [Race("transfer", block, last.record, sent.access.record)]
