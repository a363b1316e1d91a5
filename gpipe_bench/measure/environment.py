"""Facts of devices, machine and software, as columns of a row; for runs that have loaded PyTorch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from gpipe_bench.measure.devices import distinct_devices
from gpipe_bench.measure.host import cpu_count, cpu_name, host_facts, machine_slug


def environment_facts(devices: Iterable[torch.device | str], hosts: int = 1) -> dict[str, Any]:
    """Machine and software as columns of :class:`gpipe_bench.results.rows.Row`; what is unknown stays empty.

    Args:
        devices: devices of the run on each host, repeats allowed.
        hosts: how many hosts there are.
    """
    found = distinct_devices(devices) or [torch.device("cpu")]
    name = device_name(found[0])
    return {
        "device": f"{found[0].type} {name}",
        "device_count": len(found) * hosts,
        "profile": machine_slug(name, _machine_count(found[0])),
        "cuda": torch.version.cuda or "",
        **host_facts(),
    }


def device_name(device: torch.device) -> str:
    """The model of a device, as its vendor writes it."""
    if device.type == "cpu":
        return cpu_name()
    read = getattr(torch.get_device_module(device), "get_device_name", None)
    try:
        return str(read(device)) if read is not None else device.type
    except (RuntimeError, AssertionError):  # PyTorch raises the latter when built without CUDA
        return device.type


def _machine_count(device: torch.device) -> int:
    if device.type == "cpu":
        return cpu_count()
    count = getattr(torch.get_device_module(device), "device_count", None)
    return int(count()) if count is not None else 1
