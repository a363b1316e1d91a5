"""A machine of devices of one kind, as the event simulation asks for it.

A machine on disk is used without reading the profile again, which takes longer than many simulations.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from gpipe_bench.machine.profile import Link, Profile

PROFILES: Final = Path(__file__).parent / "profiles"
"""Folder of the profiles that come with the package."""

WAYS: Final = ("within", "across", "host")
"""The links of a topology."""

_HOST: Final = -1
_WIRE: Final = -1


class _Way(NamedTuple):
    """A link: usable 10^9 bytes per second, nanoseconds of an empty transfer, and whether transfers take turns."""

    gb_per_s: float
    latency_ns: float
    shared: bool

    @classmethod
    def of(cls, link: Link) -> _Way:
        return cls(link.gb_per_s, link.latency_us * 1000, link.shared)


class HardwareMachine:
    """What the event simulation asks of hardware.

    Args:
        profile: of the devices and their links.
        network: link between hosts; None: there is one host.
        host_size: devices of each host, whose numbers follow each other.

    Attributes:
        launch_ns: host time per kernel or copy.
        lock_permille: the same where several threads launch, in thousandths of it; 0: they share no interpreter lock.
        queue_depth: launches that a device holds before the host waits.
        capacity_bytes: usable memory of a device; 0 for no limit.
    """

    def __init__(self, profile: Profile, network: Link | None = None, host_size: int = sys.maxsize) -> None:
        topology = profile.topology
        self.launch_ns = round(profile.host_us * 1000)
        self.lock_permille = round(profile.constants.get("lock", 0) * 1000)
        self.queue_depth = profile.queue_depth
        self.capacity_bytes = profile.capacity_bytes
        self._host_size, self._group_size = host_size, topology.group_size
        self._within, self._across, self._host = (_Way.of(profile.links[getattr(topology, way)]) for way in WAYS)
        self._network = _Way.of(network) if network else self._across
        # A copy within a device's own memory is read and written.
        rate = profile.bandwidth_gb_per_s * profile.efficiency.memory_bound / 2
        self._own = _Way(rate, profile.kernel_floor_us * 1000, False)

    def host_ns(self, launches: Mapping[int, int]) -> int:
        """Host time of launches for some devices: of the busiest thread, or of all where they share a lock."""
        locked = sum(launches.values()) * self.lock_permille // 1000 if len(launches) > 1 else 0
        return self.launch_ns * max(locked, *launches.values(), 0)

    def copy_ns(self, source: int, target: int, nbytes: int) -> int:
        """Time of a transfer of ``nbytes`` from device ``source`` to ``target``; -1 is host memory."""
        way = self._own if source == target else self._way(source, target)
        # 10^9 bytes per second is one byte per nanosecond.
        return round(nbytes / way.gb_per_s + way.latency_ns)

    def buses(self, source: int, target: int) -> tuple[tuple[int, int], ...]:
        """What transfers from device ``source`` to ``target`` share with those of other devices.

        Between groups of a host it is their link in this direction; between hosts the network card of each.
        """
        if _HOST in (source, target) or not self._way(source, target).shared:
            return ()
        (one, first), (other, second) = self._place(source), self._place(target)
        return ((first, second),) if one == other else ((one, _WIRE), (_WIRE, other))

    def _way(self, source: int, target: int) -> _Way:
        if _HOST in (source, target):
            return self._host
        (one, first), (other, second) = self._place(source), self._place(target)
        if one != other:
            return self._network
        return self._within if first == second else self._across

    def _place(self, device: int) -> tuple[int, int]:
        """The host of a device, and its group, numbered over all hosts."""
        host, number = divmod(device, self._host_size)
        return host, host * -(-self._host_size // self._group_size) + number // self._group_size
