"""Where partitions are: devices, workers and streams, handed out as the engine hands them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

__all__ = ["POOL", "Places"]

POOL: Final = 32
"""Streams per device and priority in PyTorch's pool; more requests share them (c10/cuda/CUDAStream.cpp)."""


class Places:
    """The streams of a pipeline, numbered; stream d below the number of devices is the default stream of device d.

    Args:
        devices: device of each partition; may repeat.
        copy_streams: whether copies have streams of their own.
        transfer: ``direct``, or ``host``, which gives partitions that share a device a compute stream each.
        streams: whether devices have streams at all; the CPU has none.
        rows: for each partition its device of the schedule: those of one row share a compute stream, and copy nothing;
            by default each has its own.
    """

    def __init__(
        self,
        devices: Sequence[int],
        *,
        copy_streams: bool,
        transfer: str,
        streams: bool = True,
        rows: Sequence[int] | None = None,
    ) -> None:
        self.devices = tuple(devices)
        self.rows = tuple(range(len(self.devices)) if rows is None else rows)
        self.count = max(self.devices) + 1
        self.transfer = transfer
        self.streams = streams
        self.device_of: list[int] = list(range(self.count))
        self._separate = copy_streams and streams
        # Streams asked for, and those in the pools: by device and whether they copy, which has a priority of its own.
        self._taken: Counter[tuple[int, bool]] = Counter()
        self._pool: dict[tuple[int, bool, int], int] = {}
        self._copying: list[list[int]] = [[] for _ in self.devices]
        self.workers: list[int] = []
        self.computing: list[int] = []
        first: dict[int, int] = {}
        for j, device in enumerate(self.devices):
            # Tasks of one device are issued by one thread; each partition on the CPU is a device of its own.
            self.workers.append(first.setdefault(device, j) if streams else j)
            row = self.rows[j]
            shared = len({row for row, other in zip(self.rows, self.devices, strict=True) if other == device}) > 1
            if not (streams and transfer == "host" and shared):
                self.computing.append(device)
            elif row in self.rows[:j]:
                self.computing.append(self.computing[self.rows.index(row)])
            else:
                self.computing.append(self._new(device, copying=False))

    def copying(self, i: int, j: int) -> int:
        """The stream on which partition j copies micro-batch i; its compute stream without copy streams."""
        if not self._separate:
            return self.computing[j]
        made = self._copying[j]
        while len(made) <= i:
            made.append(self._new(self.devices[j], copying=True))
        return made[i]

    def moves(self, source: int, target: int) -> bool:
        """Whether anything is copied between two partitions."""
        staged = self.transfer == "host" and self.rows[source] != self.rows[target]
        return staged or self.devices[source] != self.devices[target]

    def _new(self, device: int, *, copying: bool) -> int:
        key = (device, copying, self._taken[device, copying] % POOL)
        self._taken[device, copying] += 1
        if key not in self._pool:
            self._pool[key] = len(self.device_of)
            self.device_of.append(device)
        return self._pool[key]
