"""Vector clocks of a trace: what has ended on all streams, of all ranks, before each record begins.

    host 0 ── launches ──> streams of rank 0 ── events ──> other streams of rank 0
       │                          │
       │ messages of the CPU      │ messages of devices
       ▼                          ▼
    host 1 ── launches ──> streams of rank 1 ── events ──> ...

The race check asks of two accesses to memory if one has ended before the other begins, whatever the durations. A
vector clock answers: it holds, for each stream, how many records of this stream have certainly ended. Each stream and
each host has one, and joins (takes the maxima of) another's when it waits for it:

- A launch joins the host's clock into the stream's. A stream runs its records in the order of their launch.
- A recorded event keeps its stream's clock. A stream that waits for the event joins this clock.
- A synchronisation joins the streams' clocks into the host's.

A message orders ranks only as its data does. A rank whose part reads a tensor sends data; a rank whose part writes one
receives data; in an all-reduce each rank does both.

- A receiving part ends after all sending parts have begun and read their tensors. So a receive ends after its send
  has read, and an all-reduce after all ranks have come to it; of a broadcast all ranks wait for the root alone. In
  a scatter or reduce-scatter a receiver gets one piece. This shows that the senders have begun, not that they have read
  the other pieces.
- A part that only sends waits for no rank. NCCL calls a send blocking, but it ends as soon as its data is in the
  buffers between the ranks (``NCCL_BUFFSIZE``, 4 MiB), possibly before the receive begins: github.com/NVIDIA/nccl,
  issues 544 and 1252.
- A part may write from its begin on. Only if all of its data comes from other ranks, as in a receive, does it write
  after they have begun.
- Messages of CPU tensors order hosts in the same way: from the sender's call to the receiver's wait.

These rules hold for every protocol of NCCL and every size, so they hide no race. In return, some orders that a real
run has count as none, and the check may report a race there: an order that exists only because sends are too large for
the buffers, and one that goes through an all-to-all (its pieces may be empty), a group of gloo's own, a store or a
file.

A message of which a part never comes has no moment (``None``), nor has what comes after it.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_bench.machine.trace import HOST, Record

Queue = tuple[int, int]
Clock = npt.NDArray[np.int64]
"""By the number of a stream: how many of its records have ended."""

_LAUNCHED: Final = frozenset({"kernel", "copy", "meet", "record", "wait", "alloc"})
_UNORDERED: Final = "all_to_all"
_IN_PIECES: Final = frozenset({"reduce_scatter", "scatter"})


class HostMessage(NamedTuple):
    """A rank's host gives its data to a message of CPU tensors, or has that of the others.

    Attributes:
        row: rows of the rank's trace before it.
        key: the same for all ranks of a message.
        gives: whether it gives; else it has waited for all who give.
        line: of the script.
    """

    row: int
    key: str
    gives: bool
    line: str = ""


class Moment(NamedTuple):
    """When a record runs.

    Attributes:
        stream: the number of its stream.
        read_time: the count of its stream when its reads have ended.
        time: the same of its writes.
        clock: what has ended before it begins.
        write_clock: what has ended before it writes.
    """

    stream: int
    read_time: int
    time: int
    clock: Clock
    write_clock: Clock

    def follows(self, stream: int, time: int, *, writing: bool = False) -> bool:
        """Whether it comes after what ended on a stream at a time."""
        # A stream runs one record after the other.
        return stream == self.stream or bool((self.write_clock if writing else self.clock)[stream] >= time)


class _Launch(NamedTuple):
    record: Record
    place: tuple[int, int]
    time: int
    host: Clock


@dataclass(slots=True)
class _Stream:
    number: int
    clock: Clock
    # The host's clock that it has joined last.
    host: Clock
    issued: int = 0
    waiting: deque[_Launch] = field(default_factory=deque)

    def ended(self, time: int) -> Clock:
        """What has ended when it has come to a time."""
        clock = self.clock.copy()
        clock[self.number] = time
        return clock


@dataclass(slots=True)
class _Meeting:
    wanted: int
    parts: int = 0
    givers: int = 0
    begun: dict[tuple[int, int], Clock] = field(default_factory=dict)


class Clocks:
    """The moments of all records.

    Args:
        ranks: the records of each, in the order of their launch; versions and meetings are those of all ranks.
        messages: those of each rank's host, in the order of their rows.

    Attributes:
        moments: by rank and row; None: it is launched on no stream, or never runs.
        stuck: of each rank whose host waits for ever: how many rows come before, and the message of CPU tensors that
            it waits for; None: it waits for its device.
    """

    def __init__(self, ranks: Sequence[Sequence[Record]], messages: Sequence[Sequence[HostMessage]] = ()) -> None:
        self._ranks = ranks
        self._messages = messages or [()] * len(ranks)
        self.moments: list[list[Moment | None]] = [[None] * len(records) for records in ranks]
        self.stuck: dict[int, tuple[int, HostMessage | None]] = {}
        keys = dict.fromkeys((rank, one.queue) for rank, own in enumerate(ranks) for one in own if _is_launched(one))
        self._start: Clock = np.zeros(len(keys), np.int64)
        self._streams = {key: _Stream(number, self._start, self._start) for number, key in enumerate(keys)}
        self._meetings = _meetings(ranks)
        self._givers = Counter(one.key for own in self._messages for one in own if one.gives)
        self._given: defaultdict[str, list[Clock]] = defaultdict(list)
        # Of events: all that a host has issued, and those that have passed.
        self._recorded: set[int] = set()
        self._passed: dict[int, Clock] = {}
        self._steps = 0
        self._run()

    def _run(self) -> None:
        hosts = [self._host(rank) for rank in range(len(self._ranks))]
        before = -1
        while self._steps > before:
            before = self._steps
            for host in hosts:
                next(host, None)
            for stream in self._streams.values():
                self._drain(stream)

    def _host(self, rank: int) -> Iterator[None]:
        """Go through the rows of a rank; yields while its host waits."""
        clock = self._start
        messages: defaultdict[int, list[HostMessage]] = defaultdict(list)
        for message in self._messages[rank]:
            messages[message.row].append(message)
        records = self._ranks[rank]
        for row in range(len(records) + 1):
            for message in messages.get(row, ()):
                given = self._given[message.key]
                if message.gives:
                    given.append(clock)
                    self._steps += 1
                    continue
                while len(given) < self._givers[message.key]:
                    self.stuck[rank] = row, message
                    yield
                clock = reduce(np.maximum, given, clock)
            if row == len(records):
                self.stuck.pop(rank, None)
                return
            record = records[row]
            if _is_launched(record):
                self._launch(record, (rank, row), clock)
            elif record.kind in {"sync_stream", "sync_device"}:
                streams = list(self._named(rank, record))
                while any(stream.waiting for stream in streams):
                    self.stuck[rank] = row, None
                    yield
                clock = reduce(np.maximum, (stream.ended(stream.issued) for stream in streams), clock)
            elif record.kind == "sync_event" and record.version in self._recorded:
                while record.version not in self._passed:
                    self.stuck[rank] = row, None
                    yield
                clock = np.maximum(clock, self._passed[record.version])
            self._steps += 1

    def _named(self, rank: int, record: Record) -> Iterator[_Stream]:
        """The streams that a synchronisation waits for."""
        for (own, queue), stream in self._streams.items():
            if own == rank and (queue == record.queue or (record.kind == "sync_device" and queue[0] == record.device)):
                yield stream

    def _launch(self, record: Record, place: tuple[int, int], host: Clock) -> None:
        stream = self._streams[place[0], record.queue]
        # The reads of a part of a message end first, then its writes.
        stream.issued += 2 if record.kind == "meet" else 1
        stream.waiting.append(_Launch(record, place, stream.issued, host))
        if record.kind == "record":
            self._recorded.add(record.version)
        self._drain(stream)

    def _drain(self, stream: _Stream) -> None:
        """Run what a stream has, up to what must wait."""
        while stream.waiting and self._begins(stream, stream.waiting[0]):
            stream.waiting.popleft()
            self._steps += 1

    def _begins(self, stream: _Stream, launch: _Launch) -> bool:
        """Run a record, if what it waits for is over."""
        record = launch.record
        if launch.host is not stream.host:
            stream.clock, stream.host = np.maximum(stream.clock, launch.host), launch.host
        before = write_clock = after = stream.clock
        read_time = launch.time
        if record.kind == "wait" and record.version in self._recorded:
            if record.version not in self._passed:
                return False
            after = np.maximum(before, self._passed[record.version])
        elif record.kind == "record":
            self._passed[record.version] = stream.ended(launch.time)
        elif record.kind == "meet":
            read_time -= 1
            meeting = self._meetings.get(record.meeting)
            if meeting and record.reads:
                meeting.begun.setdefault(launch.place, stream.ended(read_time - (record.name in _IN_PIECES)))
            if meeting and record.writes:
                if meeting.parts < meeting.wanted or len(meeting.begun) < meeting.givers:
                    return False
                after = reduce(np.maximum, meeting.begun.values(), before)
                write_clock = before if record.reads else after
        rank, row = launch.place
        self.moments[rank][row] = Moment(stream.number, read_time, launch.time, before, write_clock)
        stream.clock = after
        return True


def _is_launched(record: Record) -> bool:
    return record.kind in _LAUNCHED and not (record.kind == "alloc" and record.device == HOST)


def _meetings(ranks: Sequence[Sequence[Record]]) -> dict[int, _Meeting]:
    """The messages of devices whose data orders ranks, by their numbers."""
    found: dict[int, _Meeting] = {}
    for records in ranks:
        for record in records:
            if record.kind == "meet" and record.meeting and record.nbytes and record.name != _UNORDERED:
                meeting = found.setdefault(record.meeting, _Meeting(record.parts))
                meeting.parts += 1
                meeting.givers += bool(record.reads)
    return found
