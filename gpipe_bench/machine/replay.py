"""A trace in virtual time: when each row runs on a given machine, and what the devices' allocators reserve meanwhile.

    Trace, Machine ──> columns ──> replay_new ──> replay_run ──> Replayed

Each host thread goes through its own rows in their order; a thread of autograd chooses among the nodes that are ready.
Rows of other threads come first where a hand-over, an event, a backward pass, a node or a block says so; all else is
decided by virtual time: ``replay.h``.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, ClassVar, Final, NamedTuple, Protocol
from weakref import finalize

import numpy as np

from gpipe_bench.errors import OutOfMemory, TraceError
from gpipe_bench.machine.trace import HOST, KINDS, Trace, check_rows
from gpipe_bench.native import packaged

_ADDRESS: Final = ctypes.c_void_p
_COPY, _MARK, _MEET = (KINDS.index(kind) for kind in ("copy", "mark", "meet"))
_MOST_SHOWN: Final = 5
_STUCK, _FULL, _APART = 1, 2, 3


class Machine(Protocol):
    """What a replay needs of the hardware.

    Attributes:
        launch_ns: host time per kernel or copy.
        lock_permille: host time of a launch where several threads launch, in thousandths of ``launch_ns``: threads take
            turns; 0: they do not.
        queue_depth: launches that a stream holds before the host that issues the next one waits; 0 for no limit.
        capacity_bytes: usable memory of a device; 0 for no limit.
    """

    launch_ns: int
    lock_permille: int
    queue_depth: int
    capacity_bytes: int

    def copy_ns(self, source: int, target: int, nbytes: int) -> int:
        """Time of a transfer from device ``source`` to ``target``, either of which may be :data:`HOST`."""

    def buses(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        """Names what transfers from ``source`` to ``target`` take turns on with those of other devices, two at most."""


class DeviceMemory(NamedTuple):
    """The memory of a device at the end of a run, in bytes; in the order of ``MemoryUse`` in ``memory.h``.

    Attributes:
        live: of all tensors.
        allocated: the same, rounded as the allocator rounds.
        reserved: of segments.
        peak_live: the most so far, as those that follow.
        flushes: how often the allocator gave cached segments back.
    """

    live: int
    allocated: int
    reserved: int
    peak_live: int
    peak_allocated: int
    peak_reserved: int
    flushes: int


class _Input(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [
        *((name, _ADDRESS) for name in ("rows", "accesses", "duration_ns", "bus", "second_bus", "launch_ends")),
        ("latencies", _ADDRESS),
        *((name, ctypes.c_int64) for name in ("count", "latency_count", "devices", "buses", "from_host")),
        *((name, ctypes.c_int64) for name in ("launch_ns", "lock_permille", "queue_depth", "capacity", "task_count")),
        ("tasks", _ADDRESS),
    ]


class _Times(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [(name, _ADDRESS) for name in ("begin", "end", "host", "turn")]


class _TaskTimes(ctypes.Structure):
    _fields_: ClassVar[Sequence[Any]] = [(name, _ADDRESS) for name in ("issue", "start", "end", "turn")]


@dataclass(frozen=True)
class Replayed:
    """A trace in virtual time.

    Attributes:
        trace: the replayed trace.
        begin_ns: by row: when a kernel, copy or message began; -1 for other rows, but events and marks.
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
        return [self.end_ns[place] for place in np.flatnonzero(self.trace.table["kind"] == _MARK)]

    @property
    def meets(self) -> list[int]:
        """Rows that are parts of messages."""
        places: list[int] = np.flatnonzero(self.trace.table["kind"] == _MEET).tolist()
        return places


class TaskTimes(NamedTuple):
    """When tasks ran, by their places in the trace's table, in nanoseconds; -1: nothing of it ran on a device.

    Attributes:
        issue_ns: when a host thread issued the first of its rows that ran.
        start_ns: when the first of them began.
        end_ns: when all had ended.
        turn: place of that first row in the order in which threads came to rows.
    """

    issue_ns: array[int]
    start_ns: array[int]
    end_ns: array[int]
    turn: array[int]


class Replay:
    """A trace on a machine, to be run once.

    Args:
        trace: its kernels take the time that their rows say, or none; its copies that of the machine, unless their rows
            say another one.
        machine: what copies and launches cost.
        host_time: whether launches cost the host anything and a stream's launch queue is limited.
        tasks: ``TracedTask`` of ``memory.h`` for each of the trace's tasks, for who holds their memory.

    Attributes:
        trace: as given.
        devices: how many it knows.

    Raises:
        TraceError: the trace was read from a file, and a row cannot run.
        CompilerError: the C code cannot be compiled here.
    """

    def __init__(
        self,
        trace: Trace,
        machine: Machine,
        *,
        host_time: bool = True,
        tasks: Sequence[int] = (),
    ) -> None:
        if trace.origin is not None:
            check_rows(trace)
        self.trace = trace
        columns = _Columns(trace, machine)
        held = columns.held | {"latencies": array("q", trace.latencies_ns)}
        self.devices = columns.devices
        self._tasks = array("i", tasks)
        self._given = _Input(
            **{name: _address(column) for name, column in held.items()},
            count=len(trace.rows),
            latency_count=len(trace.latencies_ns),
            devices=columns.devices,
            buses=len(columns.buses),
            from_host=trace.names.index("host_to_device") if "host_to_device" in trace.names else -1,
            launch_ns=machine.launch_ns if host_time else 0,
            lock_permille=machine.lock_permille,
            queue_depth=machine.queue_depth if host_time else 0,
            capacity=machine.capacity_bytes,
            task_count=len(trace.tasks),
            tasks=_address(self._tasks),
        )
        self._kept = held
        self._run = _library().replay_new(ctypes.byref(self._given))
        finalize(self, _library().replay_free, self._run)

    def stream(self, device: int, stream: int) -> int:
        """The number of a stream; default streams have those of their devices."""
        number: int = _library().replay_stream(self._run, device, stream)
        return number

    def streams(self) -> array[int]:
        """The device of each stream."""
        found = array("q", bytes(8 * _library().replay_streams(self._run, None)))
        _library().replay_streams(self._run, _address(found))
        return found

    def hold(self, holder: int) -> None:
        """Let somebody hold the memory of tasks; ``holder``: the address of a ``Holder`` of ``memory.h``."""
        _library().replay_hold(self._run, holder)

    def run(self) -> bool:
        """Run all rows; whether the memory of all devices sufficed for who holds it.

        Raises:
            TraceError: rows wait for each other.
        """
        outcome = _library().replay_run(self._run)
        if outcome == _STUCK:
            raise TraceError(
                f"rows of a trace must not wait for each other, got: {'; '.join(self._stuck())}; "
                "record the trace from its first hand-over on"
            )
        if outcome == _APART:
            raise TraceError(
                f"all parts of a message must come, got: {'; '.join(self._apart())}; record every process from its "
                "first message on"
            )
        return bool(outcome != _FULL)

    def _apart(self) -> Iterator[str]:
        """Parts that came and never began."""
        found = self.rows()
        never = [place for place in found.meets if found.turn[place] and found.end_ns[place] < 0]
        for place in never[:_MOST_SHOWN]:
            row = self.trace.rows[place]
            yield f"row {place} (one of {row.parts} parts of message {row.meeting}) never begins"

    def _stuck(self) -> Iterator[str]:
        row, awaited = ctypes.c_int64(0), ctypes.c_int64(0)
        for _ in range(_MOST_SHOWN):
            if not _library().replay_stuck(self._run, ctypes.byref(row), ctypes.byref(awaited)):
                return
            yield f"{_named(self.trace, row.value)} waits for {_named(self.trace, awaited.value)}"
            row.value += 1

    def rows(self) -> Replayed:
        """When rows ran, and the memory of their blocks."""
        begin, end, host, turn = times = [array("q", bytes(8 * len(self.trace.rows))) for _ in range(4)]
        _library().replay_times(self._run, ctypes.byref(_Times(*map(_address, times))))
        memory = []
        for device in range(self.devices):
            found = array("q", bytes(8 * len(DeviceMemory._fields)))
            _library().replay_memory(self._run, device, _address(found))
            memory.append(DeviceMemory(*found))
        shortage = array("q", bytes(8 * 4))
        _library().replay_shortage(self._run, _address(shortage))
        full = OutOfMemory(*shortage) if any(shortage) else None
        return Replayed(self.trace, begin, end, host, turn, tuple(memory), full)

    def tasks(self) -> TaskTimes:
        """When tasks ran."""
        # Those of a recording are named when it has run.
        self._given.task_count = len(self.trace.tasks)
        times = TaskTimes(*(array("q", bytes(8 * len(self.trace.tasks))) for _ in TaskTimes._fields))
        _library().replay_tasks(self._run, ctypes.byref(_TaskTimes(*map(_address, times))))
        return times

    def ends(self) -> tuple[int, int]:
        """When all was over, in nanoseconds; and how much the clock did: moves, waits and attempts to start."""
        now, effort = ctypes.c_int64(), ctypes.c_int64()
        _library().replay_ends(self._run, ctypes.byref(now), ctypes.byref(effort))
        return now.value, effort.value


def replay(trace: Trace, machine: Machine, *, host_time: bool = True) -> Replayed:
    """Run a trace in virtual time: see :class:`Replay`.

    Raises:
        TraceError: rows wait for each other.
        CompilerError: the C code cannot be compiled here.
    """
    made = Replay(trace, machine, host_time=host_time)
    made.run()
    return made.rows()


class _Columns:
    """Columns beside the rows.

    Attributes:
        held: rows, accesses, nanoseconds of each row and its buses.
        buses: numbers of those that copies take turns on.
        devices: how many the trace knows.
    """

    def __init__(self, trace: Trace, machine: Machine) -> None:
        rows = trace.table
        self.devices = 1 + int(max(rows[name].max(initial=0) for name in ("device", "peer")))
        duration = rows["duration_ns"].copy()
        for place in np.flatnonzero((rows["kind"] == _COPY) & (duration < 0)).tolist():
            row = trace.rows[place]
            ends = (row.device, row.peer) if trace.names[row.name] != "host_to_device" else (row.peer, row.device)
            duration[place] = machine.copy_ns(*ends, row.bytes)
        moves = (rows["kind"] == _COPY) | (rows["kind"] == _MEET)
        between = np.flatnonzero(moves & (rows["device"] != HOST) & (rows["peer"] != HOST))
        ends_of = rows["device"][between].astype(np.int64) * self.devices + rows["peer"][between]
        pairs, first, which = np.unique(ends_of, return_index=True, return_inverse=True)
        self.buses: dict[tuple[int, int], int] = {}
        taken = np.full((2, len(pairs)), -1, np.int32)
        for pair in np.argsort(first):
            for one, bus in enumerate(machine.buses(*divmod(int(pairs[pair]), self.devices))):
                taken[one, pair] = self.buses.setdefault(bus, len(self.buses))
        buses = np.full((2, len(rows)), -1, np.int32)
        buses[:, between] = taken[:, which]
        self.held: dict[str, Any] = {
            "rows": trace.rows,
            "accesses": trace.accesses,
            "duration_ns": duration,
            "bus": buses[0],
            "second_bus": buses[1],
            "launch_ends": trace.launch_ends,
        }


def _address(column: Any) -> int | None:
    """Where the items of an array are; None if there are none."""
    return np.frombuffer(column, np.uint8).ctypes.data if len(column) else None


def _named(trace: Trace, place: int) -> str:
    row = trace.rows[place]
    return f"row {place} ({KINDS[row.kind]} {row.version} of thread {row.thread})"


@cache
def _library() -> ctypes.CDLL:
    loaded = packaged("machine")
    for name, result, arguments in (
        ("replay_new", _ADDRESS, [_ADDRESS]),
        ("replay_stream", ctypes.c_int32, [_ADDRESS, ctypes.c_int32, ctypes.c_int32]),
        ("replay_streams", ctypes.c_int64, [_ADDRESS, _ADDRESS]),
        ("replay_hold", None, [_ADDRESS, _ADDRESS]),
        ("replay_run", ctypes.c_int, [_ADDRESS]),
        ("replay_times", None, [_ADDRESS, _ADDRESS]),
        ("replay_tasks", None, [_ADDRESS, _ADDRESS]),
        ("replay_ends", None, [_ADDRESS, _ADDRESS, _ADDRESS]),
        ("replay_memory", None, [_ADDRESS, ctypes.c_int32, _ADDRESS]),
        ("replay_shortage", None, [_ADDRESS, _ADDRESS]),
        ("replay_stuck", ctypes.c_int, [_ADDRESS, _ADDRESS, _ADDRESS]),
        ("replay_free", None, [_ADDRESS]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
