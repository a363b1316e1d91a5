"""Streams of any device type, through PyTorch's generic ``torch.Stream``.

A device without streams (the CPU) has the stream None: waiting for it, entering it or recording a tensor on it does
nothing. So the engine has one path for CUDA, other accelerators and the CPU.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

__all__ = ["Stream", "current_stream", "has_streams", "new_stream", "record_stream", "use_stream", "wait_stream"]

Stream = torch.Stream | None

_NOTHING = nullcontext()


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams."""
    return _type_has_streams(device.type)


@functools.cache
def _type_has_streams(device_type: str) -> bool:
    return device_type not in ("cpu", "meta") and hasattr(torch.get_device_module(device_type), "Stream")


def current_stream(device: torch.device) -> Stream:
    """The stream that this thread currently uses on ``device``."""
    return torch.accelerator.current_stream(device) if has_streams(device) else None


def new_stream(device: torch.device, *, copying: bool = False) -> Stream:
    """A stream from PyTorch's pool for ``device``.

    A pool has 32 streams for each priority, and more requests share them. Streams that copy have a priority, and so
    a pool, of their own: a copy on the compute stream of some partition would stall it.
    """
    if not has_streams(device):
        return None
    return torch.Stream(device, priority=-1 if copying else 0)


def use_stream(stream: Stream) -> AbstractContextManager[object]:
    """Make ``stream``, and its device, current in this thread for a block.

    ``with stream:`` would do so too, but a ``torch.Stream`` can be entered only once at a time (pytorch#176560, in 2.11
    at least), and here one stream is entered by several threads, and within itself.
    """
    return _NOTHING if stream is None else _Using(stream)


class _Using(AbstractContextManager[None]):
    __slots__ = ("_device", "_previous", "_stream")

    def __init__(self, stream: torch.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        self._device = torch.accelerator.current_device_index()
        self._previous = torch.accelerator.current_stream(self._stream.device)
        torch.accelerator.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.accelerator.set_stream(self._previous)
        torch.accelerator.set_device_index(self._device)


def wait_stream(waiter: Stream, awaited: Stream) -> None:
    """Work queued on ``waiter`` from now on starts after everything queued on ``awaited`` so far."""
    if waiter is not None and awaited is not None and waiter != awaited:
        waiter.wait_stream(awaited)


def record_stream(tensor: Tensor, stream: Stream) -> None:
    """Tell the allocator that ``stream`` uses ``tensor``, which another stream allocated.

    Without it the memory could be handed out again, on the allocating stream, while ``stream`` still reads it.
    """
    if stream is not None and tensor.device.type == stream.device.type:
        tensor.record_stream(stream)
