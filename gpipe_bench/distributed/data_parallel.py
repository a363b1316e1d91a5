"""Data parallelism beside a pipeline: replicas train on parts of a batch, and average their gradients once per step.

The gradients of a partition are sent as soon as its last backward action has ended, while others still compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.schedules import Action


class Replicas:
    """The processes that have the same partitions, in all replicas of a pipeline.

    Args:
        group: of these processes, an own one (see :func:`gpipe_bench.distributed.channel.own_group`).
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._partitions: Sequence[nn.Module] = ()
        self._left: Counter[int] = Counter()
        self._sums: list[tuple[Any, Tensor, list[Tensor]]] = []

    def copy(self, module: nn.Module) -> None:
        """Give the parameters and buffers of all replicas the values of the first one."""
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                value = tensor.detach().contiguous()
                self._group.broadcast(value, 0).wait()
                tensor.copy_(value)

    def begin(self, partitions: Sequence[nn.Module], order: Iterable[Action]) -> None:
        """Before a step: what the process will do with its partitions."""
        self._partitions, self._sums = partitions, []
        self._left = Counter(action.j for action in order if action.kind in "BW")

    def done(self, action: Action) -> None:
        """After an action: if it was the last one that adds to gradients of its partition, begin to average them."""
        if action.kind in "BW":
            self._left[action.j] -= 1
            if not self._left[action.j]:
                self._average(self._partitions[action.j])

    def finish(self) -> None:
        """Wait until all gradients are averaged."""
        while self._sums:
            work, flat, grads = self._sums.pop()
            work.wait()
            flat /= self._group.size()
            for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def _average(self, layers: nn.Module) -> None:
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for parameter in layers.parameters():
            if parameter.requires_grad:
                # One that got no gradient here may have got one in another replica.
                grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = grad
                by_type.setdefault(grad.dtype, []).append(grad)
        for grads in by_type.values():
            flat = torch.cat([grad.flatten() for grad in grads])
            self._sums.append((self._group.allreduce([flat]), flat, grads))
