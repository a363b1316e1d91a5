"""One name per device: what the other parts of this package need to treat every device type alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def distinct_devices(devices: Iterable[torch.device | str]) -> list[torch.device]:
    """The distinct devices among ``devices``, in the order of their first use.

    ``cuda`` and ``cuda:0`` are one device when index 0 is current; ``cpu:0`` is ``cpu``.
    """
    return list(dict.fromkeys(_with_index(torch.device(device)) for device in devices))


def distinct_accelerators(devices: Iterable[torch.device | str]) -> list[torch.device]:
    """The distinct devices that run behind the host's back: all but CPU and meta."""
    return [device for device in distinct_devices(devices) if device.type not in ("cpu", "meta")]


def _with_index(device: torch.device) -> torch.device:
    if device.type in ("cpu", "meta"):
        return torch.device(device.type)
    if device != torch.device(device.type):  # it has an index
        return device
    current = torch.accelerator.current_accelerator(check_available=True)
    here = current is not None and current.type == device.type
    return torch.device(device.type, torch.accelerator.current_device_index() if here else 0)
