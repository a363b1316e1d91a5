"""What the host issued: kernels, copies, events, synchronisations, allocations and frees, in issue order."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from gpipe_bench.emulator.library import backend

__all__ = ["HOST", "Record", "Trace", "parse", "recording"]

HOST = -1


class Record(NamedTuple):
    """One line of a trace.

    Attributes:
        kind: ``kernel``; ``copy`` between devices or with the host; ``record`` and ``wait`` of an event on a stream;
            ``sync_stream``, ``sync_device``, ``sync_event``: the host waits; ``alloc`` and ``free`` of a block;
            ``record_stream``: a stream uses a block.
        name: of the operator; of a copy ``device_to_device``, ``host_to_device`` or ``device_to_host``.
        device: where it runs; -1 is the host. A copy between devices runs on the sender's.
        stream: of that device; 0 is the default one. Of an allocation: the current one.
        thread: the host thread, numbered as first seen.
        duration: milliseconds of virtual time, if the host thread said so.
        nbytes: copied, allocated or freed.
        version: of an event: which recording of it.
        peer: the other device of a copy, -1 for the host.
        reads: blocks.
        writes: blocks; of an allocation, a free and a record_stream: the one block.
    """

    kind: str
    name: str = ""
    device: int = HOST
    stream: int = 0
    thread: int = 0
    duration: float | None = None
    nbytes: int = 0
    version: int = 0
    peer: int = HOST
    reads: tuple[int, ...] = ()
    writes: tuple[int, ...] = ()

    @property
    def queue(self) -> tuple[int, int]:
        """The stream on which it runs: (device, stream)."""
        return self.device, self.stream

    def __str__(self) -> str:
        where = f"device {self.device} stream {self.stream} thread {self.thread}"
        return f"{self.kind} {self.name} on {where}"


def parse(text: str) -> list[Record]:
    """The records in the backend's own lines."""
    return [_record(line.split("\t")) for line in text.splitlines()]


def _record(fields: list[str]) -> Record:
    kind, name, device, stream, thread, duration, nbytes, version, peer, reads, writes = fields
    given = float(duration)
    return Record(
        kind,
        name,
        int(device),
        int(stream),
        int(thread),
        None if math.isnan(given) else given,
        int(nbytes),
        int(version),
        int(peer),
        _blocks(reads),
        _blocks(writes),
    )


def _blocks(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(","))) if text else ()


class Trace:
    """The records of one recording, so far."""

    def __init__(self) -> None:
        self._records: list[Record] = []

    @property
    def records(self) -> list[Record]:
        """Everything recorded since the recording began."""
        if backend().vd_trace_size() > len(self._records):
            self._records += parse(backend().vd_trace_text(len(self._records)).decode())
        return self._records

    def of(self, kind: str) -> list[Record]:
        """The records of one kind."""
        return [record for record in self.records if record.kind == kind]


@contextmanager
def recording() -> Iterator[Trace]:
    """Record what the host issues in the block; what was issued before counts as done."""
    backend().vd_trace_start()
    trace = Trace()
    try:
        yield trace
    finally:
        backend().vd_trace_stop()
        # The next recording overwrites what is not fetched.
        _ = trace.records
