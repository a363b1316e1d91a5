"""Recording what the host issues to virtual devices as a trace."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from contextlib import contextmanager

from gpipe_bench.emulator.library import backend
from gpipe_bench.machine.trace import Row, Trace


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
