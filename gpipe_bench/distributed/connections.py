"""The connections of a process of a pipeline: to the others of the pipeline, and to its replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpipe_bench.distributed.channel import PATIENCE_S, own_groups
from gpipe_bench.distributed.data_parallel import Replicas
from gpipe_bench.distributed.failures import FailureChannel
from gpipe_bench.distributed.links import Links
from gpipe_bench.distributed.nccl import DeviceGroup
from gpipe_bench.distributed.network import Network, TorchNetwork
from gpipe_bench.errors import text_of


def given_network(group: Any, mesh: DeviceMesh | None) -> Network:
    """The processes that a user has given, by one of two arguments or none."""
    if group is not None and mesh is not None:
        raise TypeError("group and mesh must not be given both, got both; leave one out")
    given = mesh.get_group() if mesh is not None else dist.group.WORLD if group is None else group
    if given is None:
        raise ValueError("a process group must be there, got none; call torch.distributed.init_process_group first")
    return _network(given)


def _network(given: Any) -> Network:
    """Of a process group; any other network is taken as it is."""
    network: Network = TorchNetwork(given) if isinstance(given, dist.ProcessGroup) else given
    return network


class Connections:
    """Those of one process.

    Args:
        given: the processes of the pipeline.
        replicas: the process group of its replicas, or a mesh, or None.
        timeout_s: as for :func:`gpipe_bench.distributed.channel.own_groups`.
        device: likewise.

    Attributes:
        links: to the others of the pipeline.
        replicas: what replicas do together, if there are any.
        news: to and from all of these.
        over_nccl: the group that sends from device to device, if one does.

    Raises:
        ValueError: ``timeout_s`` is no time.
        PeerError: another process has stopped before all were connected.
    """

    def __init__(self, given: Network, replicas: Any, timeout_s: float, device: torch.device) -> None:
        # Both stores are taken before anything can fail, in some processes only: they would count pipelines otherwise.
        store, others, store_of_others = given.store(), None, None
        if replicas is not None:
            others = _network(replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas)
            store_of_others = others.store()
        # Not more, since it is counted in nanoseconds.
        if not (isinstance(timeout_s, (int, float)) and 0.001 <= timeout_s <= 1e9):
            raise ValueError(
                f"timeout_s must be a number of seconds between 0.001 and 1e9, got {timeout_s!r}; pass how long a "
                "process may wait for another one"
            )
        patience_s = min(timeout_s, PATIENCE_S)
        own, news = own_groups(given, store, timeout_s, device)
        self.over_nccl = own if isinstance(own, DeviceGroup) else None
        self.links = Links(own, given.ranks, direct=self.over_nccl is not None)
        groups = [(news, given.ranks)]
        self.replicas = None
        if others is not None:
            try:
                own, news = own_groups(others, store_of_others, timeout_s, device)
            except BaseException as error:
                first = FailureChannel(groups, patience_s, given.clock)
                first.tell(f"rank {first.rank} failed: {text_of(error)}")
                raise
            self.replicas = Replicas(own, Links(own, others.ranks, direct=isinstance(own, DeviceGroup)))
            groups.append((news, others.ranks))
        self.failures = FailureChannel(groups, patience_s, given.clock)
