"""Data parallelism beside a pipeline: replicas train on parts of a batch, and average their gradients once per step.

The gradients of a partition are sent as soon as its last backward action has ended, while others still compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe_bench.distributed import wire
from gpipe_bench.distributed.links import Links
from gpipe_bench.distributed.news import LostError
from gpipe_bench.distributed.staging import Staging
from gpipe_bench.schedules import Action


class Replicas:
    """The processes that have the same partitions, in all replicas of a pipeline.

    All methods raise a LostError if another one of them has failed.

    Args:
        group: of these processes, an own one (see :func:`gpipe_bench.distributed.channel.own_groups`).
        links: to them.

    Attributes:
        links: see above.
        others: the ranks of the others in the whole job.
    """

    def __init__(self, group: Any, links: Links) -> None:
        self._group, self.links = group, links
        self.others = [links.ranks[peer] for peer in links]
        self._partitions: Sequence[nn.Module] = ()
        self._left: Counter[int] = Counter()
        self._alike: tuple[Any, Tensor] | None = None
        self._sums: list[tuple[Any, Tensor, list[Tensor]]] = []

    def gather(self, value: Any) -> list[Any]:
        """The values of all replicas, which hold no tensors."""
        found, empty = {self.links.rank: value}, Staging(torch.device("cpu")).empty
        for peer in self.links:
            self.links[peer].send(*wire.pack(("end", self.links.rank, peer, 0), value))
        for peer in self.links:
            found[peer] = self.links[peer].receive(empty).value(Tensor.cpu)
        for peer in self.links:
            self.links[peer].finish()
        return [found[peer] for peer in sorted(found)]

    def copy(self, module: nn.Module) -> None:
        """Give the parameters and buffers of all replicas the values of the first one."""
        with torch.no_grad(), _lost():
            for tensor in (*module.parameters(), *module.buffers()):
                value = tensor.detach().contiguous()
                self._group.broadcast(value, 0).wait()
                tensor.copy_(value)

    def begin(self, partitions: Sequence[nn.Module], order: Sequence[Action]) -> None:
        """Before a step: what the process will do with its partitions."""
        self._partitions, self._sums = partitions, []
        own = [action.j for action in order if action.kind in "BW"]
        self._left = Counter(own)
        if own:
            # Replicas that average other gradients, or in another order, would hang or end the process.
            parameters = [each for part in partitions for each in part.parameters()]
            grads = [(each.numel(), each.dtype, each.requires_grad) for each in parameters]
            mark = crc32(repr((own, grads)).encode())
            extremes = torch.tensor([mark, -mark])
            with _lost():
                self._alike = self._group.allreduce([extremes], dist.ReduceOp.MAX), extremes

    def done(self, action: Action) -> None:
        """After an action: if it was the last one that adds to gradients of its partition, begin to average them."""
        if action.kind in "BW":
            self._left[action.j] -= 1
            if not self._left[action.j]:
                self._compare()
                with _lost():
                    self._average(self._partitions[action.j])

    def finish(self) -> None:
        """Wait until all gradients are averaged."""
        while self._sums:
            work, flat, grads = self._sums.pop()
            with _lost():
                work.wait()
            flat /= self._group.size()
            for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
                grad.copy_(part.view_as(grad))

    def _compare(self) -> None:
        """Once per step: whether all replicas average the same."""
        if self._alike is not None:
            (work, extremes), self._alike = self._alike, None
            with _lost():
                work.wait()
            if extremes.sum() != 0:
                raise ValueError(
                    "replicas must train the same parameters in the same order, got different ones on ranks "
                    f"{[*self.links.ranks]}; freeze the same layers in all of them"
                )

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


@contextmanager
def _lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise LostError(error) from None
