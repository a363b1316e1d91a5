"""A device in simulated time, with streams and events like those of PyTorch: for what needs no GPU to be tested."""

from dataclasses import dataclass, field
from time import perf_counter_ns

import torch

from gpipe_bench.engine.observer import Task


def now_us(recorder):
    """The present on the clock of a recorder's events."""
    return (perf_counter_ns() - recorder.zero_ns) / 1e3


@dataclass(eq=False)
class Device:
    """Its clock in milliseconds, and every synchronisation that somebody asked for."""

    device: torch.device
    now_ms: float = 0.0
    synchronized: int = 0
    on_synchronize: object = None

    def stream(self):
        return Stream(self.device, self)

    def task(self, kind, i, j, lane="compute"):
        return Task(kind, i, j, self.device, self.stream(), lane)


@dataclass(eq=False)
class Stream:
    device: torch.device
    simulated: Device


@dataclass(eq=False)
class Event:
    at_ms: float | None = None
    simulated: Device | None = field(default=None)

    def record(self, stream):
        self.simulated = stream.simulated
        self.at_ms = self.simulated.now_ms

    def synchronize(self):
        self.simulated.synchronized += 1
        if self.simulated.on_synchronize is not None:
            self.simulated.on_synchronize()

    def elapsed_time(self, other):
        assert self.simulated is other.simulated, "events of two devices have no common clock"
        return other.at_ms - self.at_ms


def new_event(_device):
    return Event()
