"""The process groups of a pipeline, and what is asked of them: to send and to receive some bytes.

A pipeline has groups of its own: its messages never meet those of the user's group, and its timeout is its own.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpipe_bench.distributed.nccl import DeviceGroup
from gpipe_bench.distributed.network import Group, Network
from gpipe_bench.errors import PeerError


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


def own_groups(network: Network, store: Any, timeout_s: float, device: torch.device) -> tuple[Group, Group]:
    """Two groups of the same processes for one pipeline: for messages, and for news. All of them must call this.

    Args:
        network: of the processes. Messages go over gloo, and, if it has NCCL for ``device``, tensors over NCCL.
        store: of the network, for this pipeline.
        timeout_s: how long a process waits for another one before it gives up.
        device: of this process.

    Raises:
        PeerError: a process has not called this in time, or has stopped before all were connected.
    """
    timeout = timedelta(seconds=timeout_s)
    rule = "all processes must make the pipeline"
    advice = f"within {timeout_s:g} s; see there for the cause, or wait longer with timeout_s"
    if absent := _absent(store, network, "here", timeout):
        raise PeerError(f"{rule}, got none from rank {absent} {advice}")
    try:
        upwards, downwards, news = [network.connected(way, store, timeout) for way in ("host up", "host down", "news")]
    except RuntimeError as error:
        # Those that are there wait in vain, too. This one must be done before others have lost their patience with it.
        absent = _absent(store, network, "waits", timedelta(seconds=min(timeout_s, PATIENCE_S) / 4))
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PeerError(f"{rule}, got no connection to rank {absent or 'others'} ({reason}) {advice}") from None
    host = BothWays(upwards, downwards)
    if not network.has_nccl(device):
        return host, news
    ways = [network.connected(way, store, timeout, nccl=True) for way in ("upwards", "downwards")]
    return DeviceGroup(host, *ways), news


def _absent(store: Any, network: Network, mark: str, timeout: timedelta) -> str:
    """Leave a mark in the store, and name the ranks that have left none in time."""
    keys = {f"{mark}/{peer}": rank for peer, rank in enumerate(network.ranks)}
    try:
        store.set(f"{mark}/{network.rank()}", "")
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
