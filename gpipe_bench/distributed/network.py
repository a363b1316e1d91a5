"""What lies beneath a distributed pipeline: who the processes are, how they are connected, and what time it is.

All that a process waits for, and all that it asks of a clock, goes through a :class:`Network` and the groups that it
connects. ``torch.distributed`` is one; ``tests/distributed/virtual.py`` is another, with all processes in one, in
virtual time.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


class Work(Protocol):
    """A transfer on its way."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Wait until it has ended. If it takes too long, all connections of this process are closed."""


class Group(Protocol):
    """What is used of connected processes. Those of replicas have ``allreduce`` and ``broadcast``, too."""

    def rank(self) -> int:
        """Of this process."""

    def size(self) -> int:
        """How many processes there are."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Begin to send a tensor."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Begin to receive a tensor, or a shorter one into its beginning."""


class Store(Protocol):
    """What is used of a ``torch.distributed.Store``. All methods raise a DistNetworkError if it is gone."""

    def set(self, key: str, value: str) -> None:
        """Leave a value."""

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        """Wait until all keys have a value; raises a RuntimeError if it takes too long."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have a value."""


class Network(Protocol):
    """The processes of a group, before they are connected.

    Attributes:
        ranks: that they have in the whole job.
    """

    ranks: Sequence[int]

    def rank(self) -> int:
        """Of this process in the group."""

    def size(self) -> int:
        """How many processes there are."""

    def clock(self) -> float:
        """Seconds since some time or other."""

    def store(self) -> Any:
        """A store for one more pipeline of these processes, which all make their pipelines in the same order."""

    def has_nccl(self, device: torch.device) -> bool:
        """Whether tensors on a device travel over NCCL."""

    def connected(self, way: str, store: Any, timeout: timedelta, *, nccl: bool = False) -> Any:
        """A group with connections of its own; all processes must call this with the same name, and wait for all.

        Raises:
            RuntimeError: one of them is not there in time, or has gone.
        """


_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
"""For each group how many pipelines had it."""


class TorchNetwork:
    """The processes of a ``ProcessGroup``, and connections over gloo, or NCCL."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size, self.clock = group.rank, group.size, time.monotonic
        self.ranks: Sequence[int] = dist.get_process_group_ranks(group)

    def store(self) -> Any:
        """Not that of ``dist.new_group``: a group of the same processes would find addresses that were given back."""
        number = next(_numbers[self._group.group_name])
        return distributed_c10d.PrefixStore(f"gpipe_bench/{number}", self._group.get_group_store())

    def has_nccl(self, device: torch.device) -> bool:
        """Whether the process group has NCCL for the device."""
        return device.type == "cuda" and "nccl" in dist.get_backend_config(self._group)

    def connected(self, way: str, store: Any, timeout: timedelta, *, nccl: bool = False) -> Any:
        """A ``ProcessGroupGloo``, or a ``ProcessGroupNCCL``."""
        options: Any = timeout
        if nccl:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout  # noqa: SLF001 - there is no public name
        kind: Any = dist.ProcessGroupNCCL if nccl else dist.ProcessGroupGloo
        return kind(distributed_c10d.PrefixStore(way, store), self.rank(), self.size(), options)
