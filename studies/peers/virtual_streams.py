"""torchgpipe and fairscale on virtual devices: a replacement of their module ``stream``.

Both packages ask ``device.type == 'cuda'`` before they use streams, and then call ``torch.cuda``. Here the same
functions call PyTorch's interface for any accelerator. Nothing else of the packages is changed:

    new_stream, current_stream, default_stream    torch.Stream, torch.accelerator.current_stream, stream 0
    use_device, use_stream                        torch.accelerator's device and stream
    wait_stream, record_stream                    the methods of torch.Stream and Tensor

Random states of the devices are not saved for recomputation, since nothing is drawn on virtual devices.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

AbstractStream = Any
new_stream = torch.Stream
current_stream = torch.accelerator.current_stream


def default_stream(device: torch.device) -> torch.Stream:
    """The default stream of a device."""
    kind = torch.accelerator.current_stream(device).device_type
    return torch.Stream(stream_id=0, device_index=device.index, device_type=kind)


@contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Make a device current."""
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@contextmanager
def use_stream(stream: torch.Stream) -> Iterator[None]:
    """Make a stream current on its device; the current device stays."""
    index = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(index)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def get_device(stream: torch.Stream) -> torch.device:
    """The device of a stream."""
    return stream.device


def wait_stream(source: torch.Stream, target: torch.Stream) -> None:
    """Let ``source`` wait until ``target`` has run all its present work."""
    source.wait_stream(target)


def record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    """Note that ``stream`` uses the memory of a tensor."""
    tensor.record_stream(stream)


def on_virtual_devices(package: str) -> None:
    """Let a package with a module ``stream``, which has not been imported, use streams of virtual devices."""
    name = f"{package}.stream"
    stand_in = ModuleType(name, __doc__)
    vars(stand_in).update({key: value for key, value in globals().items() if not key.startswith("__")})
    sys.modules[name] = stand_in
    importlib.import_module(package)
