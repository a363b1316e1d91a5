"""The transfers of a device profile: between host and device, pinned and pageable, and between devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

_BYTES: Final = (2**20, 2**26)  # the first shows the latency of a copy, the second the bandwidth of the link
_BYTES_PER_FLOAT: Final = 4


@dataclass(frozen=True, slots=True)
class LinkCase:
    """One transfer at one size.

    Attributes:
        link: such as ``host_to_device``.
        source: device that the bytes leave.
        target: device that they reach.
        memory: ``pinned`` or ``pageable`` host memory; empty between devices.
        nbytes: bytes that arrive by one call; within a device, memory carries them twice, read and written.
        prepare: allocates both ends and returns what queues one call.
    """

    link: str
    source: str
    target: str
    memory: str
    nbytes: int
    prepare: Callable[[], Callable[[], object]]


def link_cases(device: torch.device) -> Iterator[LinkCase]:
    """Every transfer of ``device``: within it; to and from the host; to and from each other device of its type."""
    host = torch.device("cpu")
    for nbytes in _BYTES:
        yield _case("within_device", device, device, "", nbytes)
        if device.type == "cpu":
            continue
        for memory in ("pinned", "pageable"):
            yield _case("host_to_device", host, device, memory, nbytes)
            yield _case("device_to_host", device, host, memory, nbytes)
        for peer in _peers(device):
            yield _case("device_to_device", device, peer, "", nbytes)
            yield _case("device_to_device", peer, device, "", nbytes)


def _peers(device: torch.device) -> list[torch.device]:
    count: int = torch.get_device_module(device).device_count()
    return [torch.device(device.type, index) for index in range(count) if index != device.index]


def _case(link: str, source: torch.device, target: torch.device, memory: str, nbytes: int) -> LinkCase:
    def prepare() -> Callable[[], object]:
        ends = [_buffer(end, nbytes, pinned=memory == "pinned") for end in (source, target)]
        return lambda: ends[1].copy_(ends[0], non_blocking=True)

    return LinkCase(link, str(source), str(target), memory, nbytes, prepare)


def _buffer(device: torch.device, nbytes: int, *, pinned: bool) -> torch.Tensor:
    floats = nbytes // _BYTES_PER_FLOAT
    # Written once, so that the pages are there.
    return torch.empty(floats, device=device, pin_memory=pinned and device.type == "cpu").fill_(1.0)
