"""A run on the clock in C, with the memory in C or without.

    Settings, Workload, Machine ──> Lowered ──> clock_new ──> streams ──> description ──> memory_new
                                                                                              │
                                                                            Run <── clock_run ┘

Without memory, the clock runs at once.
"""

from __future__ import annotations

import ctypes
from array import array
from functools import cache
from typing import Final, NamedTuple
from weakref import finalize

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.native import packaged
from gpipe_bench.simulator.clock.lowering import Lowered
from gpipe_bench.simulator.clock.outcome import Run
from gpipe_bench.simulator.clock.settings import Settings
from gpipe_bench.simulator.clock.shared import RECORD_TYPES, RecordColumns, Result
from gpipe_bench.simulator.clock.tasks import Busy, Tasks
from gpipe_bench.simulator.memory.description import Places, describe
from gpipe_bench.simulator.workloads.workload import Machine, Workload

__all__ = ["DeviceMemory", "library", "run_on_clock"]


class DeviceMemory(NamedTuple):
    """The memory of a device at the end of a run, in bytes; in the order of ``MemoryUse`` in ``memory.h``."""

    live: int
    allocated: int
    reserved: int
    peak_live: int
    peak_allocated: int
    peak_reserved: int
    flushes: int


_ADDRESS: Final = ctypes.c_void_p
_SIGNATURES: Final = {
    "clock_new": (_ADDRESS, [_ADDRESS]),
    "clock_streams": (ctypes.c_int64, [_ADDRESS]),
    "clock_places": (None, [_ADDRESS] * 3),
    "clock_run": (ctypes.c_int, [_ADDRESS] * 4),
    "clock_free": (None, [_ADDRESS]),
    "clock_busy": (None, [_ADDRESS, *[ctypes.c_int64] * 4, _ADDRESS]),
    "clock_columns": (None, [_ADDRESS, ctypes.c_int64, ctypes.c_int64, _ADDRESS]),
    "memory_new": (_ADDRESS, [_ADDRESS, ctypes.c_int64]),
    "memory_use": (None, [_ADDRESS, ctypes.c_int32, _ADDRESS]),
    "memory_shortage": (None, [_ADDRESS, _ADDRESS]),
    "memory_free": (None, [_ADDRESS]),
}


@cache
def library() -> ctypes.CDLL:
    """The compiled clock and memory."""
    loaded = packaged("clock")
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


def run_on_clock(workload: Workload, machine: Machine, settings: Settings) -> Run:
    """Run a workload.

    Args:
        workload: as :meth:`Workload.chosen` gives it.
        machine: what copies and launches cost.
        settings: of the run.

    Raises:
        ValueError: devices or a schedule do not fit the workload.
        ScheduleError: there is no such schedule.
        OutOfMemory: a device's capacity does not suffice.
    """
    lowered, called = Lowered(workload, machine, settings), library()
    clock = _Clock(lowered)
    if not settings.memory:
        return _run(clock, None)
    description = describe(
        workload,
        clock.places(),
        capacity=machine.capacity_bytes,
        riding=not settings.components.portals,
        published=settings.flavour == "published",
        scheduled=settings.backward == "scheduled" or settings.schedule is not None,
        tally=settings.tally,
    )
    memory = called.memory_new(*description.buffer_info())
    if memory is None:
        raise AssertionError("the description of the memory is not understood")
    try:
        return _run(clock, memory)
    finally:
        called.memory_free(memory)


class _Clock:
    """A clock in C, which lives as long as somebody may ask for its tasks."""

    def __init__(self, lowered: Lowered) -> None:
        self.lowered = lowered
        self.address = library().clock_new(ctypes.byref(lowered.input))
        finalize(self, library().clock_free, self.address)

    def places(self) -> Places:
        """Where partitions are, and all streams, which have been handed out."""
        devices = self.lowered.devices
        device_of = array("i", bytes(4 * library().clock_streams(self.address)))
        computing = array("i", bytes(4 * len(devices)))
        library().clock_places(self.address, device_of.buffer_info()[0], computing.buffer_info()[0])
        return Places(self.lowered.input.devices, devices, device_of, computing)

    def columns(self, first: int, last: int) -> dict[str, array[int]]:
        """Some tasks, see RECORD in ``table.h``."""
        columns = {name: array(letter, [0]) * (last - first) for name, letter in RECORD_TYPES.items()}
        pointers = RecordColumns(**{name: column.buffer_info()[0] for name, column in columns.items()})
        library().clock_columns(self.address, first, last, ctypes.byref(pointers))
        return columns

    def busy(self, first: int, last: int, window: tuple[int, int]) -> list[Busy]:
        """The use of each device in a window of time by some tasks."""
        found = array("q", bytes(8 * len(Busy._fields) * self.lowered.input.devices))
        library().clock_busy(self.address, first, last, *window, found.buffer_info()[0])
        rows = [iter(found)] * len(Busy._fields)
        return [Busy(*row) for row in zip(*rows, strict=True)]


def _run(clock: _Clock, memory: int | None) -> Run:
    result, steps, devices = Result(), clock.lowered.input.steps, clock.lowered.input.devices
    ends = array("q", bytes(8 * steps))
    if library().clock_run(clock.address, memory, ctypes.byref(result), ends.buffer_info()[0]):
        shortage = array("q", bytes(8 * 4))
        library().memory_shortage(memory, shortage.buffer_info()[0])
        raise OutOfMemory(*shortage)
    uses = [] if memory is None else [_use(memory, device) for device in range(devices)]
    return Run(
        result=result,
        step_ends_ns=tuple(ends),
        issued=Tasks(clock, 0, result.records),
        peak_live_bytes=tuple(use.peak_live for use in uses),
        peak_allocated_bytes=tuple(use.peak_allocated for use in uses),
        peak_reserved_bytes=tuple(use.peak_reserved for use in uses),
        flushes=tuple(use.flushes for use in uses),
        devices=clock.lowered.devices,
    )


def _use(memory: int, device: int) -> DeviceMemory:
    found = array("q", bytes(8 * len(DeviceMemory._fields)))
    library().memory_use(memory, device, found.buffer_info()[0])
    return DeviceMemory(*found)
