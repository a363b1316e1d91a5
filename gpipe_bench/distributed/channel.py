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

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d


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


def own_group(group: Any, timeout_s: float) -> Group:
    """A group of the same processes for one pipeline, over gloo; all of them must call this.

    Args:
        group: a ``ProcessGroup``; any other group is taken as it is.
        timeout_s: how long a process waits for another one before it gives up.
    """
    if not isinstance(group, dist.ProcessGroup):
        found: Group = group
        return found
    # Not by dist.new_group: a group of the same processes would find the addresses of the one that was given back.
    name = f"gpipe_bench/{next(_numbers[group.group_name])}"
    store = distributed_c10d.PrefixStore(name, group.get_group_store())
    own: Any = dist.ProcessGroupGloo(store, group.rank(), group.size(), timedelta(seconds=timeout_s))
    made: Group = own
    return made
