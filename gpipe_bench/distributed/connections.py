"""The connections of a process of a pipeline: to the others of the pipeline, and to its replicas."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from gpipe_bench.distributed.channel import own_groups, ranks_of
from gpipe_bench.distributed.data_parallel import Replicas
from gpipe_bench.distributed.links import Links
from gpipe_bench.distributed.nccl import DeviceGroup
from gpipe_bench.distributed.news import News

_PATIENCE_S = 5.0
"""How long a process that stops takes to tell the others, and one that waits in vain to hear from them, at most."""


def given_group(group: Any, mesh: DeviceMesh | None) -> Any:
    """The process group that a user has given, by one of two arguments or none."""
    if group is not None and mesh is not None:
        raise TypeError("group and mesh must not be given both, got both; leave one out")
    given = mesh.get_group() if mesh is not None else dist.group.WORLD if group is None else group
    if given is None:
        raise ValueError("a process group must be there, got none; call torch.distributed.init_process_group first")
    return given


class Connections:
    """Those of one process.

    Args:
        given: the group of the pipeline.
        replicas: the group of its replicas, or a mesh, or None.
        timeout_s: as for :func:`gpipe_bench.distributed.channel.own_groups`.
        device: likewise.

    Attributes:
        links: to the others of the pipeline.
        replicas: what replicas do together, if there are any.
        news: to and from all of these.
        over_nccl: the group that sends from device to device, if one does.
    """

    def __init__(self, given: Any, replicas: Any, timeout_s: float, device: torch.device) -> None:
        own, news = own_groups(given, timeout_s, device)
        self.over_nccl = own if isinstance(own, DeviceGroup) else None
        self.links = Links(own, ranks_of(given), direct=self.over_nccl is not None)
        groups = [(news, ranks_of(given))]
        self.replicas = None
        if replicas is not None:
            others = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
            own, news = own_groups(others, timeout_s, device)
            self.replicas = Replicas(own, Links(own, ranks_of(others), direct=isinstance(own, DeviceGroup)))
            groups.append((news, ranks_of(others)))
        self.news = News(groups, min(timeout_s, _PATIENCE_S))
