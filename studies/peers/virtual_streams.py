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
from typing import Any, Final

import torch
from torch import Tensor

PACKAGES: Final = {"torchgpipe": "torchgpipe.stream", "fairscale": "fairscale.nn.pipe.stream"}
"""Package -> its module of streams."""


class CPUStreamType:
    """Of the one object that stands for "no stream"."""


CPUStream: Final = CPUStreamType()
AbstractStream = Any


def new_stream(device: torch.device) -> Any:
    """A stream of a device."""
    return CPUStream if device.type == "cpu" else torch.Stream(device)


def current_stream(device: torch.device) -> Any:
    """The current stream of a device."""
    return CPUStream if device.type == "cpu" else torch.accelerator.current_stream(device)


def default_stream(device: torch.device) -> Any:
    """The default stream of a device."""
    if device.type == "cpu":
        return CPUStream
    current = torch.accelerator.current_stream(device)
    return torch.Stream(stream_id=0, device_index=device.index, device_type=current.device_type)


@contextmanager
def use_device(device: torch.device) -> Iterator[None]:
    """Make a device current."""
    if device.type == "cpu":
        yield
        return
    before = torch.accelerator.current_device_index()
    torch.accelerator.set_device_index(device.index)
    try:
        yield
    finally:
        torch.accelerator.set_device_index(before)


@contextmanager
def use_stream(stream: Any) -> Iterator[None]:
    """Make a stream current on its device; the current device stays."""
    if not is_cuda(stream):
        yield
        return
    index = torch.accelerator.current_device_index()
    before = torch.accelerator.current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    torch.accelerator.set_device_index(index)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(index)


def get_device(stream: Any) -> torch.device:
    """The device of a stream."""
    return stream.device if is_cuda(stream) else torch.device("cpu")


def wait_stream(source: Any, target: Any) -> None:
    """Let ``source`` wait until ``target`` has run all its present work."""
    if is_cuda(target):
        if is_cuda(source):
            source.wait_stream(target)
        else:
            target.synchronize()


def record_stream(tensor: Tensor, stream: Any) -> None:
    """Note that ``stream`` uses the memory of a tensor."""
    if is_cuda(stream):
        tensor.record_stream(stream)


def is_cuda(stream: Any) -> bool:
    """Whether there is a stream."""
    return stream is not CPUStream


def as_cuda(stream: Any) -> Any:
    """The stream itself."""
    return stream


def on_virtual_devices(package: str) -> None:
    """Let a package of :data:`PACKAGES`, which has not been imported, use streams of virtual devices."""
    name = PACKAGES[package]
    stand_in = ModuleType(name, __doc__)
    vars(stand_in).update({key: value for key, value in globals().items() if not key.startswith("__")})
    sys.modules[name] = stand_in
    importlib.import_module(name.rpartition(".")[0])
