"""A trace in virtual time: when each row runs on a given machine, and what the devices' allocators reserve meanwhile.

    Trace, Machine ──> columns ──> replay_new ──> replay_run ──> Replayed

Each host thread goes through its own rows in their order; a thread of autograd chooses among the nodes that are ready.
Rows of other threads come first where a hand-over, an event, a backward pass, a node or a block says so; all else is
decided by virtual time: ``replay.h``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Final

from gpipe_bench.emulator.trace import HOST, KINDS, Row, Trace
from gpipe_bench.errors import OutOfMemory, TraceError
from gpipe_bench.native import packaged
from gpipe_bench.simulator.clock.run import DeviceMemory
from gpipe_bench.simulator.workloads.workload import Machine

_ADDRESS: Final = ctypes.c_void_p
_COPY, _MARK, _NODE, _UPDATE = (KINDS.index(kind) for kind in ("copy", "mark", "node", "update"))
_MOST_SHOWN: Final = 5


class _Input(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *((name, _ADDRESS) for name in ("rows", "accesses", "duration_ns", "bus", "second_bus")),
        *((name, ctypes.c_int64) for name in ("count", "devices", "buses", "from_host")),
        *((name, ctypes.c_int64) for name in ("launch_ns", "lock_permille", "queue_depth", "capacity")),
    ]


class _Times(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [(name, _ADDRESS) for name in ("begin", "end", "host", "turn")]


@dataclass(frozen=True)
class Replayed:
    """A trace in virtual time.

    Attributes:
        trace: the replayed trace.
        begin_ns: by row: when a kernel or copy began; -1 for other rows, but events and marks.
        end_ns: when it ended; of a recorded event when it passed; of a mark when all rows before it had ended.
        host_ns: when the row's thread came to it.
        turn: its place in the order in which threads came to rows.
        memory: of each device; only the allocations of the trace count.
        shortage: the first device whose capacity does not suffice; it then holds as much as is asked for.
    """

    trace: Trace
    begin_ns: array[int]
    end_ns: array[int]
    host_ns: array[int]
    turn: array[int]
    memory: tuple[DeviceMemory, ...]
    shortage: OutOfMemory | None

    @property
    def makespan_ns(self) -> int:
        """When the last row ended."""
        return max(self.end_ns, default=0)

    @cached_property
    def marks(self) -> list[int]:
        """When all that came before each mark had ended, in nanoseconds."""
        return [self.end_ns[place] for place in _places(self.trace, _MARK)]

    def sums(self, what: str, first: int = 0, last: int | None = None) -> Counter[int]:
        """``launches``, or ``duration_ns`` of kernels, for each device, by rows from ``first`` to before ``last``."""
        found: Counter[int] = Counter()
        columns = (_column(self.trace, name)[first:last] for name in ("kind", "device", "peer", what))
        for kind, device, peer, count in zip(*columns, strict=True):
            if kind != _UPDATE:
                found[peer if kind == _NODE else device] += max(0, count)
        return found

    def updating_ns(self, first: int = 0, last: int | None = None) -> int:
        """Time in which the host keeps devices waiting, by rows from ``first`` to before ``last``."""
        kinds, times = (_column(self.trace, name)[first:last] for name in ("kind", "duration_ns"))
        return sum(time for kind, time in zip(kinds, times, strict=True) if kind == _UPDATE)


def replay(trace: Trace, machine: Machine, *, host_time: bool = True) -> Replayed:
    """Run a trace in virtual time.

    Args:
        trace: its kernels take the time that their rows say, or none; its copies that of the machine, unless their rows
            say another one.
        machine: what copies and launches cost.
        host_time: whether launches cost the host anything and a stream's launch queue is limited.

    Raises:
        TraceError: rows wait for each other.
        CompilerError: the C code cannot be compiled here.
    """
    columns = _Columns(trace, machine)
    given = _Input(
        **{name: _address(column) for name, column in columns.held.items()},
        count=len(trace.rows),
        devices=columns.devices,
        buses=len(columns.buses),
        from_host=trace.names.index("host_to_device") if "host_to_device" in trace.names else -1,
        launch_ns=machine.launch_ns if host_time else 0,
        lock_permille=machine.lock_permille,
        queue_depth=machine.queue_depth if host_time else 0,
        capacity=machine.capacity_bytes,
    )
    run = _library().replay_new(ctypes.byref(given))
    try:
        return _run(run, trace, columns.devices)
    finally:
        _library().replay_free(run)


class _Columns:
    """Columns beside the rows.

    Attributes:
        held: rows, accesses, nanoseconds of each row and its buses.
        buses: numbers of those that copies take turns on.
        devices: how many the trace knows.
    """

    def __init__(self, trace: Trace, machine: Machine) -> None:
        self.buses: dict[tuple[int, int], int] = {}
        duration = _column(trace, "duration_ns")
        columns = tuple(array("i", [-1]) * len(trace.rows) for _ in range(2))
        for place in _places(trace, _COPY):
            row = trace.rows[place]
            ends = (row.device, row.peer) if trace.names[row.name] != "host_to_device" else (row.peer, row.device)
            if row.duration_ns < 0:
                duration[place] = machine.copy_ns(*ends, row.bytes)
            if HOST not in ends:
                for column, bus in zip(columns, machine.buses(*ends), strict=False):
                    column[place] = self.buses.setdefault(bus, len(self.buses))
        self.held: dict[str, Any] = {
            "rows": trace.rows,
            "accesses": trace.accesses,
            "duration_ns": duration,
            "bus": columns[0],
            "second_bus": columns[1],
        }
        self.devices = 1 + max(max(_column(trace, name), default=0) for name in ("device", "peer"))


def _column(trace: Trace, name: str) -> array[int]:
    field = getattr(Row, name)
    rows, every = memoryview(bytes(trace.rows)), ctypes.sizeof(Row) // field.size
    values = rows.cast("q") if field.size == 8 else rows.cast("i")
    return array(values.format, values[field.offset // field.size :: every])


def _places(trace: Trace, kind: int) -> Iterator[int]:
    return (place for place, found in enumerate(_column(trace, "kind")) if found == kind)


def _address(column: Any) -> int | None:
    """Where the items of an array are; None if there are none."""
    if not len(column):
        return None
    return column.buffer_info()[0] if isinstance(column, array) else ctypes.addressof(column)


def _run(run: int, trace: Trace, devices: int) -> Replayed:
    begin, end, host, turn = times = [array("q", bytes(8 * len(trace.rows))) for _ in range(4)]
    if not _library().replay_run(run, ctypes.byref(_Times(*map(_address, times)))):
        raise TraceError(
            f"rows of a trace must not wait for each other, got: {'; '.join(_stuck(run, trace))}; "
            "record the trace from its first hand-over on"
        )
    memory = tuple(_memory(run, device) for device in range(devices))
    return Replayed(trace, begin, end, host, turn, memory, _shortage(run))


def _shortage(run: int) -> OutOfMemory | None:
    found = array("q", bytes(8 * 4))
    _library().replay_shortage(run, _address(found))
    return OutOfMemory(*found) if any(found) else None


def _stuck(run: int, trace: Trace) -> Iterator[str]:
    row, awaited = ctypes.c_int64(0), ctypes.c_int64(0)
    for _ in range(_MOST_SHOWN):
        if not _library().replay_stuck(run, ctypes.byref(row), ctypes.byref(awaited)):
            return
        yield f"{_named(trace, row.value)} waits for {_named(trace, awaited.value)}"
        row.value += 1


def _named(trace: Trace, place: int) -> str:
    row = trace.rows[place]
    return f"row {place} ({KINDS[row.kind]} {row.version} of thread {row.thread})"


def _memory(run: int, device: int) -> DeviceMemory:
    found = array("q", bytes(8 * len(DeviceMemory._fields)))
    _library().replay_memory(run, device, _address(found))
    return DeviceMemory(*found)


@cache
def _library() -> ctypes.CDLL:
    loaded = packaged("clock")
    for name, result, arguments in (
        ("replay_new", _ADDRESS, [_ADDRESS]),
        ("replay_run", ctypes.c_bool, [_ADDRESS, _ADDRESS]),
        ("replay_memory", None, [_ADDRESS, ctypes.c_int32, _ADDRESS]),
        ("replay_shortage", None, [_ADDRESS, _ADDRESS]),
        ("replay_stuck", ctypes.c_int, [_ADDRESS, _ADDRESS, _ADDRESS]),
        ("replay_free", None, [_ADDRESS]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
