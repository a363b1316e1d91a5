"""Traces written by hand, and machines to replay them on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

from gpipe_bench.machine.replay import Replayed
from gpipe_bench.machine.trace import HOST, KINDS, Record, Row, Trace

__all__ = ["NS_PER_MS", "Bed", "passed_ns", "timed", "traced"]

NS_PER_MS = 1_000_000


@dataclass(frozen=True)
class Bed:
    """A machine whose copies take ``copy_ms`` milliseconds, with the host half of that; launches cost nothing."""

    copy_ms: float = 0.0
    launch_ns: int = 0
    lock_permille: int = 0
    queue_depth: int = 0
    capacity_bytes: int = 0
    shared: Callable[[int, int], tuple[tuple[int, int], ...]] = lambda source, target: ()

    def copy_ns(self, source: int, target: int, nbytes: int) -> int:
        return round(self.copy_ms * NS_PER_MS / (2 if HOST in (source, target) else 1))

    def buses(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        return self.shared(source, target)


def traced(*records: Record) -> Trace:
    """The trace of some records."""
    names, accesses, rows = [""], [], []
    for record in records:
        names += [record.name] * (record.name not in names)
        of_a_block = record.kind in ("alloc", "free", "record_stream")
        row = Row(
            bytes=record.nbytes,
            duration_ns=-1 if record.duration is None else round(record.duration * NS_PER_MS),
            version=record.version,
            block=record.writes[0] if of_a_block else 0,
            kind=KINDS.index(record.kind),
            name=names.index(record.name),
            device=record.device,
            stream=record.stream,
            peer=record.peer,
            peer_stream=record.peer_stream,
            thread=record.thread,
            launches=record.launches,
            sums=record.sums,
            scratch=record.scratch,
            meeting=record.meeting,
            parts=record.parts,
        )
        setattr(row, "pass", record.backward)
        row.first_read = len(accesses)
        accesses += [(block, 0, 2**63 - 1) for block in record.reads]
        row.first_write = len(accesses)
        accesses += [] if of_a_block else [(block, 0, 2**63 - 1) for block in record.writes]
        row.end_write = len(accesses)
        rows.append(row)
    return Trace(rows, [*chain(*accesses)], names)


def passed_ns(replayed: Replayed) -> dict[int, int]:
    """When each recorded event passed, by its version."""
    # An autograd thread may have freed memory since the replay: rows at the end that it does not have.
    rows = zip(replayed.trace.records, replayed.end_ns, strict=False)
    return {record.version: end for record, end in rows if record.kind == "record"}


def timed(trace: Trace, milliseconds: Mapping[str, float]) -> None:
    """Give a duration to the kernels of some operators, where the host thread gave none."""
    for row in trace.rows:
        if KINDS[row.kind] == "kernel" and row.duration_ns < 0 and trace.names[row.name] in milliseconds:
            row.duration_ns = round(milliseconds[trace.names[row.name]] * NS_PER_MS)
