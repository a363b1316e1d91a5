"""Peaks of memory: from the allocator of an accelerator, or by counting live tensors on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from gpipe_bench.errors import UnsupportedError
from gpipe_bench.measure.devices import distinct_devices
from gpipe_bench.measure.live_bytes import LiveBytes

__all__ = ["LiveBytes", "PeakMemory", "has_memory_statistics", "peak_memory", "reset_peak_memory"]


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Peaks of one device since the last reset.

    Attributes:
        device: its name, such as ``cuda:0``.
        allocated_bytes: the most that live tensors took, rounded up to the allocator's blocks.
        reserved_bytes: the most that the allocator held, free blocks and fragmentation included. Published figures
            are often this one.
    """

    device: str
    allocated_bytes: int
    reserved_bytes: int


def has_memory_statistics(device: torch.device | str) -> bool:
    """Whether the allocator of ``device`` can tell its peaks; :class:`LiveBytes` counts where it cannot."""
    device = torch.device(device)
    current = torch.accelerator.current_accelerator()
    if current is None or current.type != device.type:
        return False
    return hasattr(torch.get_device_module(device), "max_memory_reserved")


def reset_peak_memory(devices: Iterable[torch.device | str]) -> None:
    """Start new peaks on each distinct device: empty its cache first, so that reserved memory starts low too.

    Raises:
        UnsupportedError: a device whose allocator keeps no statistics.
    """
    for device in _checked(devices):
        torch.accelerator.synchronize(device)
        with torch.accelerator.device_index(device.index):
            torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def peak_memory(devices: Iterable[torch.device | str]) -> list[PeakMemory]:
    """Peaks of each distinct device, in the order of their first use.

    Raises:
        UnsupportedError: a device whose allocator keeps no statistics.
    """
    return [
        PeakMemory(
            str(device),
            int(torch.accelerator.max_memory_allocated(device)),
            int(torch.accelerator.max_memory_reserved(device)),
        )
        for device in _checked(devices)
    ]


def _checked(devices: Iterable[torch.device | str]) -> list[torch.device]:
    found = distinct_devices(devices)
    without = [str(device) for device in found if not has_memory_statistics(device)]
    if without:
        raise UnsupportedError(
            f"devices must have an allocator with statistics, got {', '.join(without)}; count with LiveBytes there"
        )
    return found
