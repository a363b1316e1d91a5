"""A machine of devices of one kind as the numbers that the event simulation asks for.

Where they come from, and which rules they keep, is said by :mod:`gpipe_bench.simulator.hardware.profile`.
"""

from __future__ import annotations

from typing import Final, NamedTuple

__all__ = ["MachineNumbers", "NumberedMachine", "Way"]

_HOST: Final = -1


class Way(NamedTuple):
    """A link: usable 10^9 bytes per second, microseconds of an empty transfer, and whether transfers take turns."""

    gb_per_s: float
    latency_us: float
    shared: bool


class MachineNumbers(NamedTuple):
    """What decides the time of launches and copies.

    Attributes:
        launch_ns: host time per kernel or copy.
        queue_depth: launches that a device holds before the host waits.
        capacity_bytes: usable memory of a device.
        own_gb_per_s: rate at which a device copies within its own memory, 10^9 bytes per second.
        own_ns: shortest time of such a copy.
        group_size: consecutive devices that are near each other.
        within: link between devices of one group.
        across: link between devices of different groups.
        host: link between a device and host memory.
    """

    launch_ns: int
    queue_depth: int
    capacity_bytes: int
    own_gb_per_s: float
    own_ns: float
    group_size: int
    within: Way
    across: Way
    host: Way


class NumberedMachine:
    """A machine; what the event simulation asks of hardware.

    Args:
        numbers: of its devices and links.
    """

    def __init__(self, numbers: MachineNumbers) -> None:
        self.numbers = numbers

    @property
    def launch_ns(self) -> int:
        """Host time per kernel or copy."""
        return self.numbers.launch_ns

    @property
    def queue_depth(self) -> int:
        """Launches that a device holds before the host waits."""
        return self.numbers.queue_depth

    @property
    def capacity_bytes(self) -> int:
        """Usable memory of a device."""
        return self.numbers.capacity_bytes

    def copy_ns(self, source: int, target: int, nbytes: int) -> int:
        """Time of a transfer of ``nbytes`` from device ``source`` to ``target``; -1 is host memory."""
        if source == target:
            # Read and written in the device's own memory.
            return round(nbytes / self.numbers.own_gb_per_s + self.numbers.own_ns)
        way = self._way(source, target)
        # 10^9 bytes per second is one byte per nanosecond.
        return round(nbytes / way.gb_per_s + way.latency_us * 1000)

    def bus(self, source: int, target: int) -> tuple[int, int] | None:
        """What transfers from device ``source`` to ``target`` share with those of other devices, if anything."""
        if _HOST in (source, target) or not self._way(source, target).shared:
            return None
        size = self.numbers.group_size
        return source // size, target // size

    def _way(self, source: int, target: int) -> Way:
        if _HOST in (source, target):
            return self.numbers.host
        size = self.numbers.group_size
        return self.numbers.within if source // size == target // size else self.numbers.across
