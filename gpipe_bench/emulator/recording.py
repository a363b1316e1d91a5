"""Recording what the host issues to virtual devices as a trace, whose rows say which task of the engine they are of."""

from __future__ import annotations

import ctypes
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gpipe_bench.emulator.library import backend, thread_index
from gpipe_bench.engine.observer import Task
from gpipe_bench.machine.replay import Replayed
from gpipe_bench.machine.trace import KINDS, Row, Trace, TracedTask

_KERNEL, _COPY, _BACKWARD = (KINDS.index(kind) for kind in ("kernel", "copy", "backward"))


class RecordedTrace(Trace):
    """The rows of a recording; while it goes on, call :meth:`fetch` for all rows so far."""

    is_open = False

    def fetch(self) -> None:
        """Fetch the rows recorded since the last call, if the recording still goes on."""
        if not self.is_open or backend().vd_trace_size() == len(self.rows):
            return
        library = backend()
        count = ctypes.c_int64()
        place = library.vd_trace_rows(ctypes.byref(count))
        self.rows = (Row * count.value).from_buffer_copy(_bytes(place, count.value * ctypes.sizeof(Row)))
        place = library.vd_trace_accesses(ctypes.byref(count))
        self.accesses = array("q", _bytes(place, 3 * 8 * count.value))
        self.names = tuple(library.vd_trace_names().decode().split("\n"))


def _bytes(place: int | None, count: int) -> bytes:
    return ctypes.string_at(place, count) if place and count else b""


def mark() -> None:
    """Say that everything issued so far, by all threads, belongs to what ends here, as a training step."""
    backend().vd_mark()


@contextmanager
def recording() -> Iterator[RecordedTrace]:
    """Record all that the host issues in the block; earlier work counts as done."""
    backend().vd_trace_start()
    trace = RecordedTrace()
    trace.is_open = True
    try:
        yield trace
    finally:
        backend().vd_trace_stop()
        # The next recording overwrites rows that are not fetched.
        trace.fetch()
        trace.is_open = False


@dataclass(slots=True)
class IssuedTask:
    """A task, and the rows that were issued while it was.

    Attributes:
        task: its description by the engine.
        thread: the host thread that issued it, as the trace numbers threads.
        first: row of the trace.
        end: row after its last one.
        nbytes: bytes that a copy moved or a forward pass produced.
    """

    task: Task
    thread: int
    first: int
    end: int = 0
    nbytes: int = 0


class TaskRows:
    """An observer that notes the rows of each task while a trace is recorded; any thread may call it.

    Attributes:
        tasks: in the order in which the tasks began.
    """

    def __init__(self) -> None:
        self.tasks: list[IssuedTask] = []
        self._lock = threading.Lock()

    def start(self, task: Task) -> IssuedTask:
        """Note that a task is about to be issued."""
        issued_task = IssuedTask(task, thread_index(), int(backend().vd_trace_size()))
        with self._lock:
            self.tasks.append(issued_task)
        return issued_task

    def finish(self, token: IssuedTask, nbytes: int) -> None:
        """Note that all of a task was issued; of several calls for one token the last counts."""
        token.end, token.nbytes = int(backend().vd_trace_size()), nbytes


def name_tasks(tasks: Iterable[IssuedTask], replayed: Replayed) -> None:
    """Let the rows of a trace say which tasks they belong to, after it was replayed; its tasks are as ``tasks`` are.

    Those of a task are the kernels and copies that its thread issued on its stream.
    """
    trace, issued = replayed.trace, _issued_rows(replayed)
    for number, issued_task in enumerate(tasks, 1):
        task = issued_task.task
        aside = task.lane == "copy"
        trace.tasks.append(
            TracedTask(task.kind, task.microbatch, task.partition, task.device.index, aside, issued_task.nbytes)
        )
        for place in _rows(issued_task, replayed, issued[issued_task.thread]):
            trace.rows[place].task = number


@dataclass(slots=True)
class _ThreadRows:
    """Rows of a host thread.

    Attributes:
        own: all that it issued, in the order of the trace.
        work: kernels and copies that it or a backward pass of its issued, in the order of virtual time.
    """

    own: list[int] = field(default_factory=list)
    work: list[int] = field(default_factory=list)


def _issued_rows(replayed: Replayed) -> dict[int, _ThreadRows]:
    """The rows of each host thread."""
    found: dict[int, _ThreadRows] = defaultdict(_ThreadRows)
    callers: dict[int, int] = {}
    for place, row in enumerate(replayed.trace.rows):
        found[row.thread].own.append(place)
        if row.kind == _BACKWARD:
            callers[row.version] = row.thread
        elif row.kind in (_KERNEL, _COPY):
            for thread in {row.thread, callers.get(getattr(row, "pass"), row.thread)}:
                found[thread].work.append(place)
    for rows in found.values():
        rows.work.sort(key=replayed.turn.__getitem__)
    return found


def _rows(issued_task: IssuedTask, replayed: Replayed, issued: _ThreadRows) -> Iterator[int]:
    """The rows of a task: what its thread came to between its start and its end, in virtual time."""
    task, turn = issued_task.task, replayed.turn.__getitem__
    streams = {(one.device.index, one.stream_id) for one in (task.stream, task.end_stream) if one is not None}
    counts = (bisect_left(issued.own, place) for place in (issued_task.first, issued_task.end))
    turns = (turn(issued.own[count - 1]) if count else 0 for count in counts)
    first, end = (bisect_right(issued.work, reached, key=turn) for reached in turns)
    for place in issued.work[first:end]:
        row = replayed.trace.rows[place]
        if (row.device, row.stream) in streams or (row.kind == _COPY and (row.peer, row.peer_stream) in streams):
            yield place
