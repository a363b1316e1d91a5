"""Training steps on the machine, with the memory of their tasks or without; the numbers are the same everywhere.

    program, or schedule ──> trace ──> machine ──> when each task ran
                                          ↕
                      who holds which tensors ──> memory of each device

Tensors live from task to task, so memory is counted while the machine runs the tasks.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain
from typing import Any, Final

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.machine.replay import DeviceMemory, Machine, Replay
from gpipe_bench.native import packaged
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.simulator.memory.description import TASK_KINDS, Streams, check_sizes, describe
from gpipe_bench.simulator.steps.settings import Settings
from gpipe_bench.simulator.steps.trace import root_latencies, step_rows
from gpipe_bench.simulator.workloads.workload import Workload
from gpipe_bench.step.result import DeviceUse, device_uses
from gpipe_bench.step.timeline import Timeline

__all__ = ["DeviceMemory", "Run", "Settings", "run"]


def _by_device(name: str) -> Any:
    return property(lambda done: tuple(getattr(device, name) for device in done.memory))


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation gives.

    Attributes:
        replay: the trace that ran.
        makespan_ns: when the last operation ended.
        effort: how much the clock did.
        step_ends_ns: when the last task of each step ended.
        events: every task of all steps.
        memory: of each device; empty without memory. Each number of all devices: ``peak_live_bytes`` and so on.
        devices: of each partition.
    """

    replay: Replay
    makespan_ns: int
    effort: int
    step_ends_ns: tuple[int, ...]
    events: Timeline
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


class Steps:
    """Training steps of one kind, whose rows are written once, for as many steps as are asked for.

    Args:
        workload: durations and bytes.
        machine: what copies and launches cost.
        settings: of the run; by default the usual ones.

    Attributes:
        settings: of the run.

    Raises:
        ConfigError: times or bytes are larger than 64 bits.
        ValueError: devices or a schedule do not fit the workload.
        ScheduleError: there is no such schedule.
    """

    def __init__(self, workload: Workload, machine: Machine, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        chosen = workload.chosen(checkpoint_stop(self.settings.checkpoint, workload.m))
        self._machine = machine
        check_sizes(chosen, self.settings.steps)
        self._rows, self._layout, self._work = step_rows(chosen, machine, self.settings)
        self._descriptions: dict[int, array[int]] = {}
        numbers = ((TASK_KINDS[task.kind], *task[1:3], *task[6:]) for task in self._rows.tasks)
        self._tasks = array("i", chain.from_iterable(numbers))

    def run(self, steps: int | None = None, *, memory: bool | None = None) -> Run:
        """Simulate some steps; by default as many as the settings say, with memory if they do.

        Raises:
            OutOfMemory: a device's capacity does not suffice.
        """
        steps = steps or self.settings.steps
        replay, found = self._replayed(steps, self._machine, memory=self.settings.memory if memory is None else memory)
        times, (now, effort) = replay.tasks(), replay.ends()
        tasks = replay.trace.tasks
        each = len(tasks) // steps
        ends = accumulate((max(times.end_ns[each * k : each * (k + 1)]) for k in range(steps)), max)
        events = Timeline(tasks, times, range(len(tasks)))
        return Run(replay, now, effort, tuple(ends), events, found, tuple(self._layout.devices))

    def memory(self, steps: int, machine: Machine | None = None) -> tuple[DeviceMemory, ...]:
        """The memory of each device after some steps; ``machine``: another one with the same times.

        Raises:
            OutOfMemory: a device's capacity does not suffice.
        """
        return self._replayed(steps, machine or self._machine, memory=True)[1]

    def _replayed(self, steps: int, machine: Machine, *, memory: bool) -> tuple[Replay, tuple[DeviceMemory, ...]]:
        trace = self._rows.trace(steps)
        trace.latencies_ns = root_latencies(self._work, replace(self.settings, steps=steps))
        replay = Replay(trace, machine, tasks=self._tasks * steps)
        if memory:
            return replay, _run_with_memory(replay, self._description(replay, machine), max(self._layout.devices) + 1)
        replay.run()
        return replay, ()

    def _description(self, replay: Replay, machine: Machine) -> array[int]:
        layout, settings, capacity = self._layout, self.settings, machine.capacity_bytes
        if capacity not in self._descriptions:
            computing = [replay.stream(*stream) for stream in layout.computing]
            streams = Streams(max(layout.devices) + 1, layout.devices, replay.streams(), computing)
            self._descriptions[capacity] = describe(
                self._work, streams, capacity=capacity, riding=not settings.components.portals,
                published=settings.flavour == "published", scheduled=settings.schedule is not None,
            )  # fmt: skip
        return self._descriptions[capacity]


def run(workload: Workload, machine: Machine, settings: Settings | None = None) -> Run:
    """Simulate training steps: see :class:`Steps`."""
    return Steps(workload, machine, settings).run()


def step_events(run: Run, steps: int = 1) -> tuple[Timeline, int]:
    """Events of the last ``steps`` steps, and how long these took, in nanoseconds; zero is their start."""
    count = len(run.step_ends_ns)
    start_ns = run.step_ends_ns[-1 - steps] if count > steps else 0
    # A single step ends when the device is idle, with the update; others with what the next ones wait for.
    end_ns = run.step_ends_ns[-1] if count > 1 else run.makespan_ns
    tasks = len(run.replay.trace.tasks)
    first = tasks // count * max(count - steps, 0)
    return run.events.part(range(first, tasks), start_ns), end_ns - start_ns


def step_uses(run: Run, devices: Sequence[int], steps: int = 1) -> tuple[DeviceUse, ...]:
    """The use of each device in the last ``steps`` steps; ``devices``: of each partition."""
    return device_uses(run.memory, *step_events(run, steps), devices)


def _run_with_memory(replay: Replay, description: array[int], devices: int) -> tuple[DeviceMemory, ...]:
    memory = _library().memory_new(*description.buffer_info())
    if memory is None:
        raise AssertionError("the description of the memory is not understood")
    try:
        replay.hold(_library().memory_holder(memory))
        if not replay.run():
            shortage = array("q", bytes(8 * 4))
            _library().memory_shortage(memory, shortage.buffer_info()[0])
            raise OutOfMemory(*shortage)
        uses = []
        for device in range(devices):
            found = array("q", bytes(8 * len(DeviceMemory._fields)))
            _library().memory_use(memory, device, found.buffer_info()[0])
            uses.append(DeviceMemory(*found))
        return tuple(uses)
    finally:
        _library().memory_free(memory)


_ADDRESS: Final = ctypes.c_void_p


@cache
def _library() -> ctypes.CDLL:
    loaded = packaged("machine")
    for name, result, arguments in (
        ("memory_new", _ADDRESS, [_ADDRESS, ctypes.c_int64]),
        ("memory_holder", _ADDRESS, [_ADDRESS]),
        ("memory_use", None, [_ADDRESS, ctypes.c_int32, _ADDRESS]),
        ("memory_shortage", None, [_ADDRESS, _ADDRESS]),
        ("memory_free", None, [_ADDRESS]),
    ):
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded
