"""NVIDIA's management library, where there is one; everywhere else None, never an exception."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pynvml

if TYPE_CHECKING:
    import torch


@contextmanager
def nvml_session() -> Iterator[Any]:
    """The initialised library, or None without a driver; sessions may nest."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def driver_version() -> str:
    """Version of the NVIDIA driver; empty without one."""
    with nvml_session() as nvml:
        if nvml is None:
            return ""
        try:
            return str(nvml.nvmlSystemGetDriverVersion())
        except pynvml.NVMLError:
            return ""


def device_handle(nvml: Any, device: torch.device) -> Any:
    """The library's handle of a CUDA device, or None.

    Found by UUID: the library numbers all devices of the machine, PyTorch only the visible ones, in another order.
    """
    import torch

    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    uuid = str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))
    if not uuid:
        return None
    try:
        return nvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}")
    except pynvml.NVMLError:
        return None
