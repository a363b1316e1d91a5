"""The memory in C beside that in Python: every call goes to both, and all that can be seen of them is compared."""

from __future__ import annotations

import ctypes
from itertools import count
from pathlib import Path

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.clock.run import library as compiled
from gpipe_bench.simulator.memory.description import describe
from tests.simulator.oracle.memory import Memory
from tests.simulator.oracle.streams import Event

FOLDER = Path(__file__).parents[2] / "gpipe_bench" / "simulator" / "memory"
RECORD = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32)
OPEN, TIED, CHECKPOINT, CELL = range(4)
PARTS = ("backward", "backward_inputs", "backward_weights")


def library() -> ctypes.CDLL:
    """The library of clock and memory, with what only these tests call."""
    return compiled()


class NativeMemory:
    """The memory in C, with the clock in Python."""

    def __init__(self, found: ctypes.CDLL, workload, places, clock, **options) -> None:
        self._c, self._clock = found, clock
        self._description = describe(workload, places, **options)
        address, length = self._description.buffer_info()
        self._memory = ctypes.c_void_p(found.memory_new(address, length))
        assert self._memory.value
        self._record = RECORD(self._recorded)
        self.devices = places.count
        found.memory_allocators.restype = ctypes.c_void_p
        self._allocators = ctypes.c_void_p(found.memory_allocators(self._memory))
        found.memory_connect(self._memory, self._record, None)

    def __del__(self) -> None:
        self._c.memory_free(self._memory)

    def call(self, name: str, *arguments: int) -> bool:
        """Whether there was room."""
        return not getattr(self._c, f"memory_{name}")(self._memory, *arguments)

    def transfer(self, *numbers: int) -> bool:
        return self.call("transfer", (ctypes.c_int32 * 7)(*numbers))

    def passed(self, event: int) -> None:
        self._c.event_passed(self._allocators, event)

    def flushed(self, device: int) -> bool:
        return bool(self._c.memory_flushed(self._memory, device))

    def uses(self) -> list[list[int]]:
        """Live, allocated, reserved, their peaks, and flushes of each device."""
        found = [(ctypes.c_int64 * 7)() for _ in range(self.devices)]
        for device, use in enumerate(found):
            self._c.memory_use(self._memory, device, use)
        return [list(use) for use in found]

    def shortage(self) -> tuple[int, ...]:
        found = (ctypes.c_int64 * 4)()
        self._c.memory_shortage(self._memory, found)
        return tuple(found)

    def _recorded(self, _, stream: int, event: int) -> int:
        passing = _Passing(self, event)
        self._clock.record(stream, Event(passing))
        passing.is_recorded = True
        return passing.pending


class _Passing:
    """In place of a list of events that have passed: tells the memory, unless there was nothing to wait for."""

    def __init__(self, memory: NativeMemory, event: int) -> None:
        self._memory, self._event = memory, event
        self.is_recorded, self.pending = False, 1

    def append(self, _: Event) -> None:
        if self.is_recorded:
            self._memory.passed(self._event)
        else:
            self.pending = 0


class BothMemories:
    """In place of :class:`Memory`; ``calls`` counts calls that were compared."""

    calls = count()
    compared = 0
    library: ctypes.CDLL
    oracle: type[Memory] = Memory

    def __init__(self, workload, places, clock, **options) -> None:
        self._scheduled = options.get("scheduled", False)
        self._skips = {skip.key: number for number, skip in enumerate(workload.skips)}
        self._native = NativeMemory(self.library, workload, places, clock, **options)
        self._python: Memory
        self._both("start", (), lambda: setattr(self, "_python", self.oracle(workload, places, clock, **options)))

    @property
    def devices(self):
        return self._python.devices

    def _both(self, name: str, numbers: tuple[int, ...], call) -> None:
        native = self._native
        fits = native.transfer(*numbers) if name == "transfer" else native.call(name, *numbers)
        BothMemories.compared += 1
        full = None
        try:
            call()
        except OutOfMemory as error:
            full = error
        if full is None:
            assert fits or name in {"collected", "transferred", "next_step"}
        else:
            assert not fits
            assert native.shortage() == (full.device, full.needed, full.reserved, full.capacity)
        if full is None or name != "start":
            self._compare(name, numbers)
        if full is not None:
            raise full

    def _compare(self, name: str, numbers: tuple[int, ...]) -> None:
        expected = [
            [one.live, one.allocated, one.reserved, one.peak_live, one.peak_allocated, one.peak_reserved, one.flushes]
            for one in self._python.devices
        ]
        assert self._native.uses() == expected, (name, numbers)

    def flushed(self, device: int) -> bool:
        found = self._python.flushed(device)
        assert self._native.flushed(device) == found
        return found

    def forward(self, node, *, again: bool) -> None:
        closed = CELL if self._scheduled else CHECKPOINT
        how = closed if node.kind == "checkpoint" else TIED if node.single else OPEN
        numbers = (node.i, node.j) if again else (node.i, node.j, how)
        self._both("recompute" if again else "forward", numbers, lambda: self._python.forward(node, again=again))

    def collected(self, node) -> None:
        self._both("collected", (node.i, node.j), lambda: self._python.collected(node))

    def backward(self, node, kind: str = "backward") -> None:
        numbers = node.i, node.j, PARTS.index(kind)
        self._both("backward", numbers, lambda: self._python.backward(node, kind))

    def transfer(self, node, *, back: bool) -> None:
        sending, receiving = (node.stream, node.peer) if back else (node.peer, node.stream)
        skip = -1 if node.skip is None else self._skips[node.skip]
        numbers = node.i, node.source, node.j, skip, back, sending, receiving
        self._both("transfer", numbers, lambda: self._python.transfer(node, back=back))

    def transferred(self) -> None:
        self._both("transferred", (), self._python.transferred)

    def loss(self) -> None:
        self._both("loss", (), self._python.loss)

    def microbatch_loss(self, i: int) -> None:
        self._both("microbatch_loss", (i,), lambda: self._python.microbatch_loss(i))

    def update(self) -> None:
        self._both("update", (), self._python.update)

    def next_step(self) -> None:
        self._both("next_step", (), self._python.next_step)


class ScriptedClock:
    """Streams that are busy until somebody says that they are not."""

    def __init__(self) -> None:
        self._waiting = {}

    def issue(self, stream):
        self._waiting.setdefault(stream, [])

    def end(self, place):
        """One of the busy streams comes to its end."""
        if self._waiting:
            stream = sorted(self._waiting)[place % len(self._waiting)]
            for event in self._waiting.pop(stream):
                event.passed.append(event)

    def idle(self, stream):
        return stream not in self._waiting

    def record(self, stream, event):
        if self.idle(stream):
            event.passed.append(event)
        else:
            self._waiting[stream].append(event)
