"""Tied weights: one parameter that layers of several partitions have, such as an embedding and the head.

    W ──┬── copy of partition 0 ── layers     its gradient, of all micro-batches ──┐
        └── copy of partition 3 ── layers     its gradient, of all micro-batches ──┴── sum ── W, once per batch

Tasks compute with copies of the parameter. Where the device is the same, a copy shares the memory of the parameter and
has a gradient of its own; partitions that belong to one device of the schedule share a copy. A copy adds up what its
micro-batches give, in the order of their backward passes. When the backward pass ends, the parameter gets the
gradients of its copies, that of the last partition first, as one gradient: autograd sums them, and calls the hooks of
the parameter once. So no result depends on which partition was the first to add.

In the paper's executor with ``checkpoint="never"`` all tasks are one graph of autograd, and copies are nodes in it.
Elsewhere they are leaves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gpipe_bench.autograd.nodes import apply, get_phony, pass_through
from gpipe_bench.engine.partition import Partition

Slot = tuple[nn.Module, str]
"""A module and the name of a parameter that is registered in it."""


@dataclass(frozen=True, slots=True)
class Tie:
    """A parameter that layers of several partitions have.

    Attributes:
        name: that the plain module gives it.
        slots: where it is registered, for each partition that has it; none for those of other processes.
    """

    name: str
    slots: dict[int, list[Slot]]

    @property
    def parameter(self) -> nn.Parameter | None:
        """The parameter, if a partition of this process has it."""
        for slots in self.slots.values():
            for module, name in slots:
                parameter = module._parameters[name]  # noqa: SLF001 - not by a getter of the module's own
                return None if parameter is None else original(parameter)
        return None

    def fasten(self) -> None:
        """Let all partitions have the parameter of the first one: moving a module may have made new ones."""
        parameter = self.parameter
        for slots in self.slots.values():
            for module, name in slots:
                module._parameters[name] = parameter  # noqa: SLF001 - as above

    def within(self, own: Sequence[bool]) -> Tie:
        """The tie as a process knows it that has only some of the partitions."""
        return Tie(self.name, {j: slots if own[j] else [] for j, slots in self.slots.items()})


def original(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter whose place a copy takes now, as in a backward pass in which a hook calls the pipeline."""
    found: nn.Parameter = getattr(parameter, "tied_to", parameter)
    return found


def find_ties(partitions: Sequence[nn.Module]) -> list[Tie]:
    """The parameters that several partitions have, in the order of their first layers."""
    found: dict[nn.Parameter, Tie] = {}
    for j, layers in enumerate(partitions):
        for place, module in layers.named_modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                tie = found.setdefault(original(parameter), Tie(f"{place}.{name}", {}))
                tie.slots.setdefault(j, []).append((module, name))
    return [tie for tie in found.values() if len(tie.slots) > 1]


@dataclass(slots=True)
class Copy:
    """A copy of a tied weight that gathers gradients.

    Attributes:
        parameter: the weight.
        use: the weight behind a node that adds the gradients of all its copies, made on the caller's stream.
        tensor: what partitions compute with.
        tie: the index of the tie.
        rank: the device of the schedule whose partitions have the copy.
    """

    parameter: nn.Parameter
    use: Tensor
    tensor: Tensor
    tie: int
    rank: int

    def take_grad(self) -> Tensor | None:
        """Give the gradient away, on the device of the parameter."""
        grad, self.tensor.grad = self.tensor.grad, None
        return None if grad is None else grad.to(self.parameter.device)


class Copies:
    """The copies with which the tasks of one batch compute, made of the weights as they are now.

    Args:
        ties: what is tied.
        partitions: in place.
        learning: whether a backward pass follows.
        whole: whether it runs once, through one graph of all tasks.

    Attributes:
        ties: see above.
        leaves: copies that gather gradients, in the order in which these are added: that of the last partition first.
    """

    def __init__(self, ties: Sequence[Tie], partitions: Sequence[Partition], *, learning: bool, whole: bool) -> None:
        self.ties = ties
        self.leaves: list[Copy] = []
        # (module, name, weight, copy) of each partition that computes with copies.
        self._swaps: defaultdict[int, list[tuple[nn.Module, str, nn.Parameter, Tensor]]] = defaultdict(list)
        self._phonies: dict[int, Tensor] = {}
        for index, tie in enumerate(ties):
            homes: dict[int, list[int]] = {}
            for j in sorted(tie.slots, reverse=True):
                if tie.slots[j]:
                    homes.setdefault(partitions[j].rank, []).append(j)
            parameter = tie.parameter
            if parameter is None:
                continue
            trained = learning and parameter.requires_grad
            uses = apply(_Uses, *[parameter] * len(homes)) if trained else [parameter.detach()] * len(homes)
            for (rank, own), use in zip(homes.items(), uses, strict=True):
                if not trained and partitions[own[0]].device == parameter.device:
                    continue
                tensor = use.to(partitions[own[0]].device)
                if trained and not whole:
                    tensor = nn.Parameter(tensor.detach())
                    self.leaves.append(Copy(parameter, use, tensor, index, rank))
                tensor.tied_to = parameter
                for j in own:
                    self._swaps[j] += [(*slot, parameter, tensor) for slot in tie.slots[j]]

    def in_use(self, j: int) -> AbstractContextManager[None]:
        """A block in which the layers of partition j have their copies; one thread at a time runs them."""
        return self._swapped(self._swaps[j]) if j in self._swaps else nullcontext()

    @contextmanager
    def _swapped(self, swaps: Sequence[tuple[nn.Module, str, nn.Parameter, Tensor]]) -> Iterator[None]:
        for module, name, _, copy in swaps:
            module._parameters[name] = copy  # type: ignore[assignment]  # noqa: SLF001 - as torch.func.functional_call
        try:
            yield
        finally:
            for module, name, parameter, _ in swaps:
                module._parameters[name] = parameter  # noqa: SLF001 - as above

    def entrance(self, partition: Partition) -> Tensor | None:
        """A phony, behind which the weights get the gradients of the copies of a partition once no task needs it more.

        None if there are none. The stream on which its node is made must be that of the tasks.
        """
        own = [copy for copy in self.leaves if copy.rank == partition.rank]
        if own and partition.j not in self._phonies:
            self._phonies[partition.j] = apply(_Gather, own, partition.device, *[copy.use for copy in own])
        return self._phonies.get(partition.j)


class _Uses(Function):
    """(weight, weight, ...) -> as many copies; backward autograd adds their gradients in this order."""

    is_pure_to_gpipe_bench = True

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> tuple[Tensor, ...]:
        return pass_through(ctx, weights, (True,) * len(weights))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return grads


class _Gather(Function):
    """(copies, device, weights...) -> a phony; backward gives the weights the gradients of their copies."""

    @staticmethod
    def forward(ctx: Any, copies: list[Copy], device: torch.device, *_: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.copies = copies
        return get_phony(device).detach()

    @staticmethod
    def backward(ctx: Any, *_: Tensor | None) -> tuple[Any, ...]:
        return (None, None, *[copy.take_grad() for copy in ctx.copies])
