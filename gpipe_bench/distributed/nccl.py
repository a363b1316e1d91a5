"""NCCL for what is on the devices of processes, and gloo for what is in host memory.

NCCL carries out what two processes send each other on one stream of the device, in the order in which it was begun. If
both directions shared it, a send could wait for ever for a receive that is behind it. So there are two groups, each
with a communicator of its own for every two processes:

    upwards     from a lower rank to a higher one
    downwards   from a higher rank to a lower one

A receive keeps a part of the device busy until its message comes. So it is begun when it is waited for, not before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Later(NamedTuple):
    """A receive that is begun when it is waited for. The current stream then waits for it, the host does not."""

    begin: Callable[[], Any]

    def wait(self, *timeout: Any) -> Any:
        return self.begin().wait(*timeout)


class DeviceGroup:
    """A :class:`gpipe_bench.distributed.network.Group` that sends tensors of a device directly.

    Args:
        host: for tensors in host memory.
        upwards: for tensors of a device that go to a higher rank.
        downwards: for those that go to a lower rank.
    """

    def __init__(self, host: Any, upwards: Any, downwards: Any) -> None:
        self._host, self._upwards, self._downwards = host, upwards, downwards
        self._rank: int = host.rank()
        self._size: int = host.size()

    def rank(self) -> int:
        """Of this process."""
        return self._rank

    def size(self) -> int:
        """How many processes there are."""
        return self._size

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        """Begin to send a tensor, after what the current stream has been told to compute."""
        return self._between(tensors[0], self._rank, rank).send(_bytes(tensors), rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        """Begin to receive a tensor, or be ready to."""
        begin = partial(self._between(tensors[0], rank, self._rank).recv, _bytes(tensors), rank, tag)
        return begin() if tensors[0].device.type == "cpu" else _Later(begin)

    def allreduce(self, tensors: list[Tensor], *operation: Any) -> Any:
        """Begin to sum up a tensor over all processes, or what else ``operation`` says."""
        return self._between(tensors[0], 0, 1).allreduce(tensors, *operation)

    def broadcast(self, tensor: Tensor, root: int) -> Any:
        """Begin to give all processes the tensor of one."""
        return self._between(tensor, 0, 1).broadcast(tensor, root)

    def connect(self, edges: Collection[tuple[int, int]], device: torch.device) -> None:
        """Make all communicators, one after the other: later on the device may be busy with messages."""
        for source, target in sorted(edges):
            if self._rank in (source, target):
                byte = torch.zeros(1, dtype=torch.uint8, device=device)
                sends = source == self._rank
                (self.send([byte], target, 0) if sends else self.recv([byte], source, 0)).wait()
                torch.accelerator.synchronize(device)

    def abort(self) -> None:
        """Abort all transfers that still wait on the device."""
        self._upwards.abort()
        self._downwards.abort()

    def _between(self, tensor: Tensor, source: int, target: int) -> Any:
        if tensor.device.type == "cpu":
            return self._host
        return self._upwards if source < target else self._downwards


def _bytes(tensors: list[Tensor]) -> list[Tensor]:
    """The same memory, whatever the type: NCCL does not know all of them."""
    return [tensor.view(torch.uint8) for tensor in tensors]
