"""The process group of a pipeline, and what is asked of it: to send and to receive some bytes.

A pipeline has a group of its own: its messages never meet those of the user's group, and its timeout is its own. Only
four methods of the group are used, so tests put threads in the place of processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gpipe_bench.distributed.nccl import DeviceGroup


class Work(Protocol):
    """A transfer on its way."""

    def wait(self, timeout: timedelta = ...) -> Any:
        """Wait until it has ended. If it takes too long, all connections of this process are closed."""


class Group(Protocol):
    """What is used of a ``torch.distributed.ProcessGroup``."""

    def rank(self) -> int:
        """Of this process."""

    def size(self) -> int:
        """How many processes there are."""

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Begin to send a tensor."""

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Work:
        """Begin to receive a tensor, or a shorter one into its beginning."""


_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
"""For each group how many pipelines had it: its processes make their pipelines in the same order."""


def own_group(group: Any, timeout_s: float, device: torch.device) -> Group:
    """A group of the same processes for one pipeline; all of them must call this.

    Args:
        group: a ``ProcessGroup``; any other group is taken as it is. Messages go over gloo, and, if ``group`` has NCCL
            for ``device``, tensors over NCCL.
        timeout_s: how long a process waits for another one before it gives up.
        device: of this process.
    """
    if not isinstance(group, dist.ProcessGroup):
        found: Group = group
        return found
    # Not by dist.new_group: a group of the same processes would find the addresses of the one that was given back.
    name = f"gpipe_bench/{next(_numbers[group.group_name])}"
    timeout = timedelta(seconds=timeout_s)

    def made(kind: Any, way: str, options: Any) -> Any:
        store = distributed_c10d.PrefixStore(f"{name}/{way}", group.get_group_store())
        return kind(store, group.rank(), group.size(), options)

    host: Group = made(dist.ProcessGroupGloo, "host", timeout)
    if device.type != "cuda" or "nccl" not in dist.get_backend_config(group):
        return host
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - there is no public name
    ways = (made(dist.ProcessGroupNCCL, way, options) for way in ("upwards", "downwards"))
    return DeviceGroup(host, *ways)
