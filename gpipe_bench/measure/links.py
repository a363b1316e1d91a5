"""How fast a device exchanges data with the host's pinned memory and with its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Final

import torch

from gpipe_bench.measure.queued import device_seconds

Way = tuple[torch.device, torch.device]

_BYTES: Final = (2**20, 2**26)  # the first shows the latency of a copy, the second the bandwidth of the link
_GIGA: Final = 1e9
_US_PER_S: Final = 1e6


def ways(device: torch.device) -> Mapping[str, Sequence[Way]]:
    """From where to where each link copies: ``host``, and ``within`` if there is a neighbour."""
    host, others = torch.device("cpu"), _others(device)
    found = {"host": [(host, device), (device, host)], "within": [(device, other) for other in others[:1]]}
    return {name: ends for name, ends in found.items() if ends}


def _others(device: torch.device) -> list[torch.device]:
    if device.type == "cpu":
        return []
    count: int = torch.get_device_module(device).device_count()
    return [torch.device(device.type, index) for index in range(count) if index != device.index]


def link_rate(link: Sequence[Way], device: torch.device, repeats: int) -> tuple[float, float]:
    """10^9 bytes per second and microseconds of an empty transfer, by the slower of its ways."""
    small, large = (
        max(median(device_seconds(_copy(*way, nbytes), device, repeats)) for way in link) for nbytes in _BYTES
    )
    # No latency is half of the time of a large copy: on a CPU the small one may have been held up.
    rate = (_BYTES[1] - _BYTES[0]) / max(large - small, large / 2)
    return rate / _GIGA, max(0.0, small - _BYTES[0] / rate) * _US_PER_S


def _copy(source: torch.device, target: torch.device, nbytes: int) -> Callable[[], object]:
    ends = [_buffer(end, nbytes, pinned=source.type != target.type) for end in (source, target)]
    return lambda: ends[1].copy_(ends[0], non_blocking=True)


def _buffer(device: torch.device, nbytes: int, *, pinned: bool) -> torch.Tensor:
    # Written once, so that the pages are there.
    return torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pinned and device.type == "cpu").fill_(1)
