"""A training step as a trace: rows that host threads issue, such as kernels, copies, events and hand-overs."""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from struct import Struct
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from gpipe_bench.errors import TraceError

HOST = -1

KINDS: Final = (
    *("kernel", "copy", "record", "wait", "sync_stream", "sync_device", "sync_event", "alloc", "free", "record_stream"),
    *("signal", "await", "backward", "backward_end", "mark", "node", "full", "update"),
    *("task", "host", "nest", "root", "return", "meet"),
)
"""Kinds of rows, by their numbers in ``trace_row.h``."""

_KERNEL, _NODE, _UPDATE = (KINDS.index(kind) for kind in ("kernel", "node", "update"))
_OF_A_BLOCK: Final = frozenset({"alloc", "free", "record_stream"})
_NS_PER_MS: Final = 1_000_000

_MOST: Final = 1 << 16
"""The highest number of a thread, a stream or a device."""

_NODES: Final = frozenset({"node", "root", "return"})
_BEGIN_VERSIONS: Final = frozenset({"record", "signal", "backward", "nest"})


class Row(ctypes.Structure):
    """One row of a trace, as ``trace_row.h`` explains it."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("bytes", "duration_ns", "version", "pass", "block")),
        *((name, ctypes.c_int64) for name in ("first_read", "first_write", "end_write", "adding_ns", "first_end")),
        *((name, ctypes.c_int32) for name in ("kind", "name", "device", "stream")),
        *((name, ctypes.c_int32) for name in ("peer", "peer_stream", "thread", "launches")),
        *((name, ctypes.c_int32) for name in ("sums", "scratch", "adding_launches", "gradients", "task", "joined")),
        *((name, ctypes.c_int32) for name in ("meeting", "parts")),
    )


ROW: Final = Struct("".join("q" if kind is ctypes.c_int64 else "i" for _, kind, *_ in Row._fields_))
"""The same, to read many rows at once."""

ROW_TYPE: Final = np.dtype(Row)
"""The same, for columns of many rows."""


class Record(NamedTuple):
    """One row of a trace, with names.

    Attributes:
        kind: ``kernel``; ``copy`` between devices or with the host; ``record`` and ``wait`` of an event on a stream;
            ``sync_stream``, ``sync_device``, ``sync_event``: the host waits; ``alloc`` and ``free`` of a block;
            ``record_stream``: a stream uses a block; ``signal``, ``await``, ``backward``, ``backward_end`` and
            ``mark``: hand-overs between host threads; ``node``: a thread begins a node of autograd; ``full``: the
            program is told that the device is full; ``update``: the host goes through the parameters of an update, and
            keeps their device waiting; ``task``: a thread begins a task that is no kernel and no copy between devices,
            or has issued all of it; ``host``: the thread is busy; ``nest``, ``root``, ``return``: a nested backward
            pass of PyTorch 1.3, as ``trace_row.h`` explains it; ``meet``: a part of a message between processes.
        name: of the operator; of a copy ``device_to_device``, ``host_to_device`` or ``device_to_host``.
        device: where it runs; -1 is the host. A copy between devices runs on the sender's.
        stream: of that device; 0 is the default one. Of an allocation: the current one.
        thread: the host thread, numbered as first seen.
        duration: milliseconds of virtual time, if they are known.
        nbytes: copied, allocated or freed; of a node its sequence number.
        version: of an event: which recording of it. Of a hand-over: which one.
        peer: the other device of a copy, -1 for the host.
        reads: blocks; of a node the numbers of those that wait for it.
        writes: blocks; of an allocation, a free and a record_stream: the one block; of a node its own number.
        peer_stream: the current stream of a copy's other device.
        launches: how many kernels the host launches; of a node, whose ``peer`` is then its device, 1 if it keeps a
            gradient without a kernel.
        backward: the innermost backward pass that the row belongs to, by its version, or 0.
        sums: whether the row adds gradients up.
        scratch: whether an allocation is for a kernel that can do without.
        spans: for each of the reads, then of the writes, bytes of the block: the first, and the one after the last.
        meeting: of a part of a message: which message, from 1.
        parts: how many parts that has.
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
    peer_stream: int = 0
    launches: int = 0
    backward: int = 0
    sums: bool = False
    scratch: bool = False
    spans: tuple[tuple[int, int], ...] = ()
    meeting: int = 0
    parts: int = 0

    @property
    def queue(self) -> tuple[int, int]:
        """The stream on which it runs: (device, stream)."""
        return self.device, self.stream

    def __str__(self) -> str:
        where = f"device {self.device} stream {self.stream} thread {self.thread}"
        return f"{self.kind} {self.name} on {where}"


class TracedTask(NamedTuple):
    """A task of a pipeline, as rows of a trace name it.

    Attributes:
        kind: one of :data:`gpipe_bench.results.timeline.KINDS`; or one of those that take no time on any stream, see
            :mod:`gpipe_bench.simulator.memory.description`.
        i: micro-batch.
        j: partition, of a copy that where it arrives.
        device: the device that runs it, for a copy the sender's.
        aside: whether it runs on a copy stream.
        nbytes: bytes moved by a copy, or of the results of a forward pass.
        skip: the skip that is copied alone, or -1.
        source: of a copy in a forward pass: the partition that sends.
        how: how a forward pass is run, see ``simulator/memory/memory.h``.
    """

    kind: str
    i: int = 0
    j: int = 0
    device: int = 0
    aside: bool = False
    nbytes: int = 0
    skip: int = -1
    source: int = 0
    how: int = 0


class Trace:
    """Rows, and the tables that they point into.

    Args:
        rows: in issue order.
        accesses: what ``first_read``, ``first_write`` and ``end_write`` of the rows point into; three numbers each,
            ``TraceAccess`` of ``trace_row.h``.
        names: what ``name`` of the rows points into.

    Attributes:
        rows: as given.
        accesses: as given.
        names: as given.
        launch_ends: what ``first_end`` of the rows points into, from 1: when each launch of a row has run, after its
            start, in nanoseconds.
        tasks: what ``task`` of the rows points into, from 1.
        origin: the file that it was read from, or None.
        latencies_ns: how long the roots of nested passes take to come back, one after the other, again and again.
    """

    def __init__(self, rows: Sequence[Row] = (), accesses: Sequence[int] = (), names: Sequence[str] = ("",)) -> None:
        self.rows: ctypes.Array[Row] = (Row * len(rows))(*rows)
        self.accesses: array[int] = array("q", accesses)
        self.names: tuple[str, ...] = tuple(names)
        self.launch_ends: array[int] = array("q")
        self.tasks: list[TracedTask] = []
        self.origin: Path | None = None
        self.latencies_ns: tuple[int, ...] = (100_000,)
        self._records: list[Record] = []

    @property
    def table(self) -> npt.NDArray[np.void]:
        """The rows as a table of :data:`ROW_TYPE`, in the same memory."""
        return np.ctypeslib.as_array(self.rows)

    def sums(self, what: str, first: int = 0, last: int | None = None) -> Counter[int]:
        """``launches``, or ``duration_ns`` of kernels, for each device, by rows from ``first`` to before ``last``.

        First gradients count without the time that adding them to others would take.
        """
        rows = self.table[first:last]
        if what == "duration_ns":
            rows = rows[rows["kind"] == _KERNEL]
        counts = np.maximum(0, rows[what])
        if what == "duration_ns":
            adding = np.flatnonzero(rows["adding_ns"])
            adding = adding[np.unique(rows["gradients"][adding], return_index=True)[1]]
            counts[adding] -= rows["adding_ns"][adding]
        where = np.where(rows["kind"] == _NODE, rows["peer"], rows["device"])
        # Below 2^53 its floats are whole numbers.
        sums = np.bincount(where - HOST, counts).astype(int).tolist()
        return Counter({device: total for device, total in enumerate(sums, HOST) if total})

    def updating_ns(self, first: int = 0, last: int | None = None) -> int:
        """Time in which the host keeps devices waiting, by rows from ``first`` to before ``last``."""
        rows = self.table[first:last]
        return int(rows["duration_ns"][rows["kind"] == _UPDATE].sum())

    def fetch(self) -> None:
        """Bring the rows up to date; only a recording that still goes on has newer ones."""

    @property
    def records(self) -> list[Record]:
        """The rows with names: everything recorded since the recording began."""
        self.fetch()
        known = ROW.size * len(self._records)
        self._records += map(self._record, ROW.iter_unpack(memoryview(bytes(self.rows))[known:]))
        return self._records

    def of(self, kind: str) -> list[Record]:
        """The records of one kind."""
        return [record for record in self.records if record.kind == kind]

    def _record(self, row: tuple[Any, ...]) -> Record:
        nbytes, duration_ns, version, within, block, first_read, first_write, end_write, *others = row
        (
            _,
            _,
            code,
            name,
            device,
            stream,
            peer,
            peer_stream,
            thread,
            launches,
            sums,
            scratch,
            _,
            _,
            _,
            _,
            meeting,
            parts,
        ) = others
        reads: tuple[int, ...] = ()
        writes: tuple[int, ...] = ()
        spans: tuple[tuple[int, int], ...] = ()
        if end_write > first_read:
            blocks, firsts, ends = (self.accesses[3 * first_read + k : 3 * end_write : 3] for k in range(3))
            reads, writes = tuple(blocks[: first_write - first_read]), tuple(blocks[first_write - first_read :])
            spans = tuple(zip(firsts, ends, strict=True))
        return Record(
            KINDS[code],
            self.names[name],
            device,
            stream,
            thread,
            None if duration_ns < 0 else duration_ns / _NS_PER_MS,
            nbytes,
            version,
            peer,
            reads,
            (block,) if KINDS[code] in _OF_A_BLOCK else writes,
            peer_stream,
            launches,
            within,
            bool(sums),
            bool(scratch),
            spans,
            meeting,
            parts,
        )


def check_rows(trace: Trace) -> None:
    """Check that the rows of a trace fit together, as those of a file that a person has changed or cut may not.

    Raises:
        TraceError: a row cannot run.
    """
    made: dict[int, str] = {}
    latest = 0
    parts = {(row.version, KINDS[row.kind]) for row in trace.rows}
    meetings = Counter(row.meeting for row in trace.rows)
    sizes = {row.meeting: row.parts for row in trace.rows}
    for number, row in enumerate(trace.rows):
        kind, begins = KINDS[row.kind], KINDS[row.kind] in _BEGIN_VERSIONS
        rules = (
            (
                f"thread, stream and peer_stream must be from 0 to {_MOST}, device and peer from -1, the host",
                all(0 <= value <= _MOST for value in (row.thread, row.stream, row.peer_stream))
                and all(-1 <= value <= _MOST for value in (row.device, row.peer)),
            ),
            (
                "launches, adding_launches, gradients and task must be 0 or more, and bytes of copies and allocations",
                min(row.launches, row.adding_launches, row.gradients, row.task) >= 0
                and (row.bytes >= 0 or kind in _NODES),
            ),
            (
                "a task must have of, microbatch and partition; what adds gradients must be among the launches",
                row.task <= len(trace.tasks)
                and row.adding_launches <= row.launches
                and row.gradients <= len(trace.rows),
            ),
            ("a busy host must have a duration", row.duration_ns >= 0 or kind not in {"host", "update"}),
            ("a node must write one block, its own number", kind not in _NODES or row.end_write == row.first_write + 1),
            (
                "versions must ascend, each above the backward pass of its row",
                not begins or max(latest, getattr(row, "pass")) < row.version,
            ),
            (
                "a root, and what returns, must be of a nested pass before it",
                kind not in {"root", "return"} or made.get(row.version) == "nest",
            ),
            (
                "a part of a message must be a meet on a device, and say of how many parts it is, as all others do",
                row.meeting == row.parts == 0
                if kind != "meet"
                else 1 <= row.meeting <= len(trace.rows)
                and row.device != HOST
                and meetings[row.meeting] <= row.parts == sizes[row.meeting],
            ),
            (
                "a nested pass must have a root and a return",
                kind != "nest" or {(row.version, "root"), (row.version, "return")} <= parts,
            ),
        )
        if broken := next((rule for rule, holds in rules if not holds), None):
            raise TraceError(f"{broken}, got another in line {number + 2} of {trace.origin}; write the trace anew")
        if begins:
            made[row.version], latest = kind, row.version
