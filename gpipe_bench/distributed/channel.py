"""The process groups of a pipeline, and what is asked of them: to send and to receive some bytes.

A pipeline has groups of its own: its messages never meet those of the user's group, and its timeout is its own. Only
four methods of a group are used, so tests put threads in the place of processes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import timedelta
from itertools import count
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from gpipe_bench.distributed.nccl import DeviceGroup
from gpipe_bench.errors import PeerError


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


class BothWays:
    """A group with connections of their own for messages to higher ranks and to lower ones.

    Gloo locks a connection while a message begins or is waited for, and gloo's own thread then asks for the lock again
    and again. With one connection for both directions it would keep a core busy that the process needs.

    Args:
        upwards: for messages to a higher rank.
        downwards: for messages to a lower rank.
    """

    def __init__(self, upwards: Any, downwards: Any) -> None:
        self._upwards, self._downwards, self._rank = upwards, downwards, upwards.rank()
        self.rank, self.size = upwards.rank, upwards.size
        self.allreduce, self.broadcast = upwards.allreduce, upwards.broadcast

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        """Begin to send a tensor."""
        return (self._upwards if self._rank < rank else self._downwards).send(tensors, rank, tag)

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> Any:
        """Begin to receive a tensor, or a shorter one into its beginning."""
        return (self._upwards if rank < self._rank else self._downwards).recv(tensors, rank, tag)


PATIENCE_S = 5.0
"""How long a process that stops takes to tell the others, and one that waits in vain to hear from them, at most."""
_numbers: defaultdict[str, Iterator[int]] = defaultdict(count)
"""For each group how many pipelines had it: its processes make their pipelines in the same order."""


def ranks_of(group: Any) -> Sequence[int]:
    """The ranks that the processes of a group have in the whole job."""
    return dist.get_process_group_ranks(group) if isinstance(group, dist.ProcessGroup) else range(group.size())


def own_groups(group: Any, timeout_s: float, device: torch.device) -> tuple[Group, Group]:
    """Two groups of the same processes for one pipeline: for messages, and for news. All of them must call this.

    Args:
        group: a ``ProcessGroup``; any other group is taken as it is. Messages go over gloo, and, if ``group`` has NCCL
            for ``device``, tensors over NCCL.
        timeout_s: how long a process waits for another one before it gives up.
        device: of this process.

    Raises:
        PeerError: a process has not called this in time, or has stopped before all were connected.
    """
    if not isinstance(group, dist.ProcessGroup):
        return group, group
    # Not by dist.new_group: a group of the same processes would find the addresses of the one that was given back.
    number = next(_numbers[group.group_name])
    store = distributed_c10d.PrefixStore(f"gpipe_bench/{number}", group.get_group_store())
    timeout = timedelta(seconds=timeout_s)
    rule = "all processes must make the pipeline"
    advice = f"within {timeout_s:g} s; see there for the cause, or wait longer with timeout_s"
    if absent := _absent(store, group, "here", timeout):
        raise PeerError(f"{rule}, got none from rank {absent} {advice}")

    def made(kind: Any, way: str, options: Any) -> Any:
        return kind(distributed_c10d.PrefixStore(way, store), group.rank(), group.size(), options)

    try:
        upwards, downwards, news = [
            made(dist.ProcessGroupGloo, way, timeout) for way in ("host up", "host down", "news")
        ]
    except RuntimeError as error:
        # Those that are there wait in vain, too. This one must be done before others have lost their patience with it.
        absent = _absent(store, group, "waits", timedelta(seconds=min(timeout_s, PATIENCE_S) / 4))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerError(f"{rule}, got no connection to rank {absent or 'others'} ({reason}) {advice}") from None
    host = BothWays(upwards, downwards)
    if device.type != "cuda" or "nccl" not in dist.get_backend_config(group):
        return host, news
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001 - there is no public name
    ways = (made(dist.ProcessGroupNCCL, way, options) for way in ("upwards", "downwards"))
    return DeviceGroup(host, *ways), news


def _absent(store: Any, group: dist.ProcessGroup, mark: str, timeout: timedelta) -> str:
    """Leave a mark in the store, and name the ranks that have left none in time."""
    keys = {f"{mark}/{peer}": rank for peer, rank in enumerate(ranks_of(group))}
    try:
        store.set(f"{mark}/{group.rank()}", "")
        try:
            store.wait([*keys], timeout)
        except dist.DistNetworkError:
            raise
        except RuntimeError:
            return ", ".join([str(rank) for key, rank in keys.items() if not store.check([key])])
    except dist.DistNetworkError as error:
        raise PeerError(
            f"all processes must make the pipeline, got no store of the process group ({error}), which rank 0 keeps "
            "unless torchrun does; see there for the cause"
        ) from None
    return ""
