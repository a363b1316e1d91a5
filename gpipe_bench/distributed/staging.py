"""Between the device of a process and the memory from which its messages are sent, on the streams of the device.

    process 0   compute stream   F(i,0) ─┐
                copy stream              └─ wait ─ copy ─┐
                host memory, pinned                      └─ message ─┐
    process 1   copy stream                                          └─ copy ─┐
                compute stream                                                └─ wait ─ F(i,1)

With NCCL there are no copies: the memory of the device itself is sent and received. On the CPU nothing is to be done.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

import torch
from torch import Tensor

from gpipe_bench.engine.transfer import (
    current_stream,
    has_streams,
    record_stream,
    shared_stream,
    use_stream,
    wait_stream,
)

_OUT, _IN = 0, 1
_STREAMS: Final = 2
"""For copies; those after them are for what is sent and received."""


class Staging:
    """The two ways of tensors, for one batch of one process.

    Args:
        device: of the process. The current stream of the thread that makes this is the one that computes.
        direct: whether messages are sent from the memory of the device.

    Attributes:
        copies: whether tensors are copied into host memory first, beside the computation.
    """

    def __init__(self, device: torch.device, *, direct: bool = False) -> None:
        self._device, self._direct, self._computing = device, direct, current_stream(device)
        self.copies = has_streams(device) and not direct

    def outgoing(self, tensors: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Begin to hand over what this thread's stream has been told to compute.

        Returns:
            To be called for the tensors as they are sent. With ``direct`` the current stream then comes after their
            computation, else they are there.
        """
        computed = current_stream(self._device)
        if computed is None:
            return lambda: [tensor.cpu() for tensor in tensors]
        copying = computed if self._direct else shared_stream(self._device, _OUT, copying=True)
        wait_stream(copying, computed)
        with use_stream(copying):
            leaving = [self._leaving(tensor) for tensor in tensors]
        event = torch.Event(self._device)
        event.record(copying)
        for tensor in tensors:
            record_stream(tensor, copying)

        def ready() -> Sequence[Tensor]:
            if not self._direct:
                event.synchronize()
            elif (sending := current_stream(self._device)) is not None:
                sending.wait_event(event)
                for tensor in leaving:
                    record_stream(tensor, sending)
            return leaving

        return ready

    def empty(self, shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory for a tensor to be received."""
        device = self._device if self._direct else torch.device("cpu")
        return torch.empty_strided(shape, strides, dtype=dtype, device=device, pin_memory=self.copies)

    def incoming(self, tensor: Tensor) -> Tensor:
        """A received tensor on the device. What computes there from now on comes after its arrival."""
        copying = current_stream(self._device)
        if tensor.device != self._device:
            copying = shared_stream(self._device, _IN, copying=True)
            with use_stream(copying):
                tensor = tensor.to(self._device, non_blocking=tensor.is_pinned())
        wait_stream(self._computing, copying)
        if copying != self._computing:
            record_stream(tensor, self._computing)
        return tensor

    def stream(self, number: int) -> AbstractContextManager[object]:
        """Make a stream of its own current for a block: what is sent there must not hold up what computes."""
        return use_stream(shared_stream(self._device, _STREAMS + number, copying=True))

    def _leaving(self, tensor: Tensor) -> Tensor:
        if self._direct:
            return tensor.to(self._device)
        if tensor.device.type == "cpu":
            return tensor
        host = self.empty(tensor.shape, tensor.stride(), tensor.dtype)
        return host.copy_(tensor, non_blocking=True)
