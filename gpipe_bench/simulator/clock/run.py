"""Training steps on the clock in C, with the memory in C or without; all numbers are whole, on every machine the same.

program, or schedule ──> Lowered ──> nodes of autograd's graph, and lists of actions of host threads
│
calling thread, workers, autograd threads issue ──> streams and engines of the clock
│
allocators
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple
from weakref import finalize

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.native import packaged
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.simulator.clock.lowering import Lowered
from gpipe_bench.simulator.clock.settings import Settings
from gpipe_bench.simulator.clock.tasks import TASK_ROW, Busy, Tasks
from gpipe_bench.simulator.memory.description import Places, check_sizes, describe
from gpipe_bench.simulator.workloads.workload import Machine, Workload

__all__ = ["DeviceMemory", "Run", "Settings", "library", "run"]


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


def _by_device(name: str) -> Any:
    return property(lambda done: tuple(getattr(device, name) for device in done.memory))


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation gives.

    Attributes:
        makespan_ns: when the last operation ended.
        effort: how much the clock did: moves in its agenda, operations that streams were found to wait for, attempts
            to start one.
        step_ends_ns: when the last operation of each step ended.
        issued: every task, in the order in which host threads issued it.
        memory: of each device; empty without memory. Each number of all devices: ``peak_live_bytes`` and so on.
        devices: of each partition.
    """

    makespan_ns: int
    effort: int
    step_ends_ns: tuple[int, ...]
    issued: Tasks
    memory: tuple[DeviceMemory, ...]
    devices: tuple[int, ...]

    peak_live_bytes = _by_device("peak_live")
    peak_allocated_bytes = _by_device("peak_allocated")
    peak_reserved_bytes = _by_device("peak_reserved")
    flushes = _by_device("flushes")

    @property
    def step_ns(self) -> int:
        """The mean time of the steps after the first; of a single one until its devices are idle."""
        ends = self.step_ends_ns
        return round((ends[-1] - ends[0]) / (len(ends) - 1)) if len(ends) > 1 else self.makespan_ns


_ADDRESS: Final = ctypes.c_void_p
_SIGNATURES: Final = {
    "clock_new": (_ADDRESS, [_ADDRESS]),
    "clock_streams": (ctypes.c_int64, [_ADDRESS]),
    "clock_places": (None, [_ADDRESS] * 3),
    "clock_run": (ctypes.c_int, [_ADDRESS] * 3),
    "clock_free": (None, [_ADDRESS]),
    "clock_busy": (None, [_ADDRESS, *[ctypes.c_int64] * 4, _ADDRESS]),
    "clock_rows": (None, [_ADDRESS, ctypes.c_int64, ctypes.c_int64, _ADDRESS]),
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


def run(workload: Workload, machine: Machine, settings: Settings | None = None) -> Run:
    """Simulate training steps.

    Args:
        workload: durations and bytes.
        machine: what copies and launches cost.
        settings: of the run; by default the usual ones.

    Raises:
        ConfigError: times or bytes are larger than 64 bits.
        ValueError: devices or a schedule do not fit the workload.
        ScheduleError: there is no such schedule.
        OutOfMemory: a device's capacity does not suffice.
    """
    settings = settings or Settings()
    workload = workload.chosen(checkpoint_stop(settings.checkpoint, workload.m))
    check_sizes(workload, settings.steps)
    clock = Clock(Lowered(workload, machine, settings))
    if not settings.memory:
        return clock.run(None)
    description = describe(
        workload,
        clock.places(),
        capacity=machine.capacity_bytes,
        riding=not settings.components.portals,
        published=settings.flavour == "published",
        scheduled=settings.schedule is not None,
    )
    memory = library().memory_new(*description.buffer_info())
    if memory is None:
        raise AssertionError("the description of the memory is not understood")
    try:
        return clock.run(memory)
    finally:
        library().memory_free(memory)


class Clock:
    """A clock in C, which lives as long as somebody may ask for its tasks."""

    def __init__(self, lowered: Lowered) -> None:
        self._lowered = lowered
        self._address = library().clock_new(ctypes.byref(lowered.input))
        finalize(self, library().clock_free, self._address)

    def places(self) -> Places:
        """Where partitions are, and all streams, which have been handed out."""
        devices = self._lowered.devices
        device_of = array("i", bytes(4 * library().clock_streams(self._address)))
        computing = array("i", bytes(4 * len(devices)))
        library().clock_places(self._address, device_of.buffer_info()[0], computing.buffer_info()[0])
        return Places(self._lowered.input.devices, devices, device_of, computing)

    def run(self, memory: int | None) -> Run:
        """Run all steps, with a memory in C or without."""
        result = array("q", bytes(8 * (3 + self._lowered.input.steps)))
        if library().clock_run(self._address, memory, result.buffer_info()[0]):
            shortage = array("q", bytes(8 * 4))
            library().memory_shortage(memory, shortage.buffer_info()[0])
            raise OutOfMemory(*shortage)
        makespan, tasks, effort, *ends = result
        devices = range(self._lowered.input.devices if memory else 0)
        uses = tuple(_use(memory, device) for device in devices if memory)
        return Run(makespan, effort, tuple(ends), Tasks(self, 0, tasks), uses, self._lowered.devices)

    def rows(self, first: int, last: int) -> Iterator[tuple[Any, ...]]:
        """Some tasks, as :data:`TASK_ROW` has them."""
        found = bytearray(TASK_ROW.size * (last - first))
        library().clock_rows(self._address, first, last, (ctypes.c_char * len(found)).from_buffer(found))
        return TASK_ROW.iter_unpack(found)

    def busy(self, first: int, last: int, start_ns: int, end_ns: int) -> list[Busy]:
        """The use of each device by some tasks from one time to another."""
        found = array("q", bytes(8 * len(Busy._fields) * self._lowered.input.devices))
        library().clock_busy(self._address, first, last, start_ns, end_ns, found.buffer_info()[0])
        rows = [iter(found)] * len(Busy._fields)
        return [Busy(*row) for row in zip(*rows, strict=True)]


def _use(memory: int, device: int) -> DeviceMemory:
    found = array("q", bytes(8 * len(DeviceMemory._fields)))
    library().memory_use(memory, device, found.buffer_info()[0])
    return DeviceMemory(*found)
