"""Where partitions are: devices, workers and streams, handed out as the engine hands them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_bench.simulator.steps.settings import Settings
from gpipe_bench.simulator.steps.writer import Stream

_POOL: Final = 32
"""Streams per device and priority in PyTorch's pool; more requests share them (c10/cuda/CUDAStream.cpp)."""


FIRST_OF_PAIRS: Final = 1 + 2 * _POOL
"""The first of the streams on which two ranks exchange messages."""


@dataclass(frozen=True)
class Layout:
    """Devices, threads and streams of a pipeline.

    Attributes:
        devices: of each partition.
        ranks: the device of the schedule of each partition.
        workers: for each partition the first one of its device, whose thread issues its tasks; each partition on the
            CPU, which has no streams, is a device of its own.
        backward: for each partition the number of autograd's thread of its device; on the CPU there is one.
        computing: stream of each partition.
        copying: the stream on which partition j copies micro-batch i, ``copying[j][i]``.
        staged: whether transfers go through the host's memory.
    """

    devices: Sequence[int]
    ranks: Sequence[int]
    workers: Sequence[int]
    backward: Sequence[int]
    computing: Sequence[Stream]
    copying: Sequence[Sequence[Stream]]
    staged: bool

    @classmethod
    def of(cls, devices: Sequence[int], ranks: Sequence[int], m: int, settings: Settings) -> Layout:
        """Compute streams are default streams; through the host, ranks that share a device have one each."""
        taken: Counter[tuple[int, int]] = Counter()
        n, staged = len(devices), settings.transfer == "host"

        def new_stream(device: int, pool: int) -> Stream:
            taken[device, pool] += 1
            return device, 1 + pool * _POOL + (taken[device, pool] - 1) % _POOL

        own: dict[int, Stream] = {}
        for device, rank in zip(devices, ranks, strict=True):
            shares = {other for shared, other in zip(devices, ranks, strict=True) if shared == device} != {rank}
            if rank not in own:
                own[rank] = new_stream(device, 0) if settings.streams and staged and shares else (device, 0)
        computing = [own[rank] for rank in ranks]
        aside = settings.components.copy_streams and settings.streams and n > 1
        copying = [
            [new_stream(device, 1) for _ in range(m)] if aside else [stream] * m
            for device, stream in zip(devices, computing, strict=True)
        ]
        workers = [devices.index(device) for device in devices] if settings.streams else range(n)
        backward = devices if settings.streams else [0] * n
        return cls(devices, ranks, workers, backward, computing, copying, staged)

    def moves(self, source: int, target: int) -> bool:
        """Whether tensors move between two partitions."""
        crosses = self.staged and self.ranks[source] != self.ranks[target]
        return crosses or self.devices[source] != self.devices[target]

    def leaving(self, i: int, j: int) -> Stream:
        """The stream on which gradients of (i, j) arrive."""
        return self.copying[j][i] if j < len(self.devices) - 1 else self.computing[j]
