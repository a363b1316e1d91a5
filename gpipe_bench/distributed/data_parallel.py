"""Data parallelism beside a pipeline: replicas train on parts of a batch, and average their gradients once per step.

The gradients of a partition are sent as soon as its last backward action has ended, while others still compute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.distributed import messages
from gpipe_bench.distributed.agreement import compare, parameters_of
from gpipe_bench.distributed.failures import LostError
from gpipe_bench.distributed.links import Links
from gpipe_bench.distributed.nccl import DeviceGroup
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
        self._tied: AbstractSet[nn.Parameter] = frozenset()
        self._left: Counter[int] = Counter()
        self._sums: list[tuple[Any, Tensor, list[Tensor]]] = []

    def agree(self, settings: Mapping[str, Any], advice: str = "make the same calls everywhere") -> None:
        """Check that all replicas have the same settings, which hold no tensors; each of them raises the same error.

        Raises:
            ValueError: they have not.
        """
        found, empty = {self.links.rank: settings}, Staging(torch.device("cpu")).empty
        for peer in self.links:
            self.links[peer].send(*messages.pack(("end", self.links.rank, peer, 0), settings))
        for peer in self.links:
            found[peer] = self.links[peer].receive(empty).value(Tensor.cpu)
        for peer in self.links:
            self.links[peer].finish()
        compare([found[peer] for peer in sorted(found)], self.links.ranks, advice)

    def copy(self, module: nn.Module) -> None:
        """Give the parameters and buffers of all replicas the values of the first one.

        Raises:
            ValueError: one of them is neither dense nor a DTensor.
        """
        with torch.no_grad():
            for name, tensor in chain(module.named_parameters(), module.named_buffers()):
                own = local_part(name, tensor.detach())
                value = own.resolve_conj().resolve_neg().contiguous()
                # As bytes: gloo does not know all types.
                self._wait(self._group.broadcast(value.flatten().view(torch.uint8), 0))
                own.copy_(value)

    def begin(
        self,
        partitions: Sequence[nn.Module],
        tied: AbstractSet[nn.Parameter],
        order: Sequence[Action],
        settings: Mapping[str, Any],
    ) -> None:
        """Before a step: what all processes will do, the partitions of this one, and which weights of them are tied.

        Raises:
            ValueError: another replica has other settings, trains other parameters or in other modes, or has not
                cleared its gradients.
        """
        named = [pair for part in partitions for pair in part.named_modules() if pair[0]]
        kept = {name for part in partitions for name, each in part.named_parameters() if each.grad is not None}
        modes = {name: "training" if module.training else "evaluating" for name, module in named}
        # Replicas that average other gradients, or in another order, would hang or end the process.
        parameters = parameters_of(partitions)
        own = {"parameters": parameters, "modes of layers": modes, "gradients before this step": sorted(kept)}
        self.agree({**settings, **own})
        self._partitions, self._tied, self._sums = partitions, tied, []
        self._left = Counter(action.j for action in order if action.kind in "BW")

    def done(self, action: Action) -> None:
        """After an action: if it was the last one that adds to gradients of its partition, begin to average them.

        Those of tied weights are averaged once they are summed up.

        Raises:
            ValueError: one of them is sparse.
        """
        if action.kind in "BW":
            self._left[action.j] -= 1
            if not self._left[action.j]:
                named = self._partitions[action.j].named_parameters()
                self.average([(name, parameter) for name, parameter in named if parameter not in self._tied])

    @torch.no_grad()
    def average(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Begin to average the gradients of some parameters."""
        by_type: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for name, parameter in named:
            if parameter.requires_grad:
                if parameter.grad is None:
                    # It may have got a gradient in another replica.
                    part = torch.zeros_like(local_part(name, parameter.detach()))
                else:
                    part = local_part(name, placed_as(parameter))
                by_type.setdefault(parameter.dtype, []).append((parameter, part))
        for dtype, pairs in by_type.items():
            # A parameter that got no gradient in any replica gets none: behind all stands which ones there are.
            there = torch.tensor([parameter.grad is not None for parameter, _ in pairs], device="cpu")
            flat = torch.cat([*[part.flatten() for _, part in pairs], there.to(pairs[0][1].device, dtype)])
            # Before they are added, since a sum may overflow where the mean does not.
            flat /= self._group.size()
            sent = torch.view_as_real(flat) if flat.is_complex() else flat
            self._sums.append((self._group.allreduce([sent]), flat, [parameter for parameter, _ in pairs]))

    def finish(self) -> None:
        """Wait until all gradients are averaged."""
        while self._sums:
            work, flat, parameters = self._sums.pop()
            self._wait(work)
            with torch.no_grad():
                sizes = [local_part("", parameter.detach()).numel() for parameter in parameters]
                *parts, there = torch.split(flat, [*sizes, len(parameters)])
                for index, (parameter, part) in enumerate(zip(parameters, parts, strict=True)):
                    if parameter.grad is None and there[index] != 0:
                        parameter.grad = torch.zeros_like(parameter)
                    if parameter.grad is not None:
                        grad = local_part("", parameter.grad)
                        grad.copy_(part.view_as(grad))

    def close(self) -> None:
        """Close all connections, and abort what still waits on a device."""
        self.links.close()
        if isinstance(self._group, DeviceGroup):
            self._group.abort()

    def _wait(self, work: Any) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise LostError(error) from None


def local_part(name: str, tensor: Any) -> Tensor:
    """The memory that this process has of a parameter, buffer or gradient: of a DTensor, its shard."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    # A collective may still fill it.
    part = part.wait() if hasattr(part, "wait") else part
    if part.layout != torch.strided or part.is_quantized or part.is_nested or hasattr(part, "__tensor_flatten__"):
        kind = part.layout if part.layout != torch.strided else f"a {type(part).__name__}"
        raise ValueError(
            f"parameters, buffers and gradients of replicas must be dense tensors or DTensors, got '{name}', which is "
            f"{kind}; convert it (sparse=False gives an embedding dense gradients), or leave out replicas="
        )
    found: Tensor = part
    return found


def placed_as(parameter: Any) -> Any:
    """The gradient of a parameter. That of a DTensor is placed as the parameter, so that replicas add what is alike."""
    if hasattr(parameter, "placements") and parameter.grad.placements != parameter.placements:
        parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
    return parameter.grad
