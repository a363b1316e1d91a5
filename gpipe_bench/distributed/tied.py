"""Tied weights whose partitions belong to several processes: each process has the parameter and its gradient.

    process 0, with the first partition that has W     gradient ─┐       ┌─► W
    process 3, which has W, too                        gradient ─┴─ sum ─┴─► W

The process with the first partition begins with the values of all, sums up the gradients, averages the sum over the
replicas, and gives it back. So an optimizer of the same kind in each process makes the same step. Whether it did is
seen in the next step, by a checksum of the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

from gpipe_bench.distributed.data_parallel import Replicas, local_part, placed_as
from gpipe_bench.engine.tied import Copies, Copy, Tie

_WHOLE_NUMBERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Processes(Protocol):
    """What is used of :class:`gpipe_bench.distributed.exchange.Exchange`."""

    def tell(self, way: str, ranks: Sequence[int], value: Any) -> None:
        """Send a value to some other processes."""

    def hear(self, way: str, rank: int) -> Any:
        """Wait for what another process tells."""

    def replicated(self, job: Any) -> None:
        """Do something with the replicas, if there are any."""


class Elsewhere(nn.Module):
    """Stands in a process for a layer, or a module in one, of another process, and has its tied weights alone.

    So a tied weight has its name of the plain module in each process that has it, and so have its optimizer's states.
    """


def stand_ins(ties: Sequence[Tie]) -> dict[str, nn.Module]:
    """For each layer of another process that is the first one of a tied weight of this process its stand-in."""
    root = Elsewhere()
    for tie in ties:
        if tie.parameter is not None and not tie.slots[min(tie.slots)]:
            *path, name = tie.name.split(".")
            module: nn.Module = root
            for part in path:
                if part not in module._modules:  # noqa: SLF001 - names may be those of attributes
                    module._modules[part] = Elsewhere()  # noqa: SLF001 - as above
                module = module.get_submodule(part)
            module._parameters[name] = tie.parameter  # noqa: SLF001 - as above
    return dict(root.named_children())


def owner_of(tie: Tie, ranks: Sequence[int]) -> int:
    """The process with the first partition that has a tied weight; ``ranks`` are those of all partitions."""
    return ranks[min(tie.slots)]


def pairs(ties: Sequence[Tie], ranks: Sequence[int]) -> dict[tuple[int, int], list[int]]:
    """For (owner, another process that has it) the indices of their tied weights, in one order for all processes."""
    found: dict[tuple[int, int], list[int]] = {}
    for index, tie in enumerate(ties):
        owner = owner_of(tie, ranks)
        for other in sorted({ranks[j] for j in tie.slots} - {owner}):
            found.setdefault((owner, other), []).append(index)
    return found


@torch.no_grad()
def share(processes: Processes, ties: Sequence[Tie], ranks: Sequence[int], rank: int) -> None:
    """Give each process of ``ties`` the values of the first one."""
    for (owner, other), indices in pairs(ties, ranks).items():
        if rank == owner:
            processes.tell("tied", [other], [_values(ties[index]) for index in indices])
        elif rank == other:
            for index, value in zip(indices, processes.hear("tied", owner), strict=True):
                _values(ties[index]).copy_(value)


@torch.no_grad()
def summed(
    processes: Processes, copies: Copies, ranks: Sequence[int], rank: int
) -> list[tuple[nn.Parameter, Tensor | None]]:
    """The sums of the gradients of all copies, for the tied weights of this process.

    Raises:
        ValueError: a weight has not the same values in all processes that have it, or is frozen in some of them.
    """
    ties, own = copies.ties, {copy.tie: copy for copy in copies.leaves}
    found = {(index, rank): _part(copy) for index, copy in own.items()}
    between = pairs(ties, ranks)
    for (owner, other), indices in between.items():
        if rank == other:
            states = [_state(ties[index], frozen=index not in own) for index in indices]
            processes.tell("tied", [owner], [*(found.get((index, rank)) for index in indices), *states])
    for (owner, other), indices in between.items():
        if rank == owner:
            told = processes.hear("tied", other)
            for index, grad, state in zip(indices, told, told[len(indices) :], strict=False):
                _check_equal(ties[index], state, (rank, other), frozen=index not in own)
                found[index, other] = grad
    owned = {index: copy for index, copy in own.items() if owner_of(ties[index], ranks) == rank}
    for index, copy in owned.items():
        # The last partition comes first, as in the graph of the plain module.
        last = {ranks[j]: j for j in sorted(ties[index].slots)}
        grads = [found[index, each] for each in sorted(last, key=lambda each: -last[each])]
        there = [grad for grad in grads if grad is not None]
        _give(copy, sum(there[1:], there[0]) if there else None)
    processes.replicated(lambda replicas: _average(replicas, owned))
    for (owner, other), indices in between.items():
        if rank == owner:
            processes.tell("tied", [other], [_part(own[index]) if index in own else None for index in indices])
    for (owner, other), indices in between.items():
        if rank == other:
            for index, grad in zip(indices, processes.hear("tied", owner), strict=True):
                if index in own:
                    _give(own[index], grad)
    return [(copy.parameter, copy.take_grad()) for copy in own.values()]


def _average(replicas: Replicas, owned: dict[int, Copy]) -> None:
    if owned:
        replicas.average([(f"tied weight {index}", copy.tensor) for index, copy in owned.items()])
        replicas.finish()


def _values(tie: Tie) -> Tensor:
    """The memory of the parameter of a tie that this process has."""
    parameter: Any = tie.parameter
    return local_part("a tied weight", parameter.detach())


def _part(copy: Copy) -> Tensor | None:
    """The memory that this process has of the gradient of a copy."""
    if copy.tensor.grad is None:
        return None
    if copy.tensor.grad.is_sparse:
        copy.tensor.grad = copy.tensor.grad.to_dense()
    return local_part("a tied weight", placed_as(copy.tensor))


def _give(copy: Copy, value: Tensor | None) -> None:
    """Let a copy have this gradient."""
    if value is None:
        copy.tensor.grad = None
        return
    if copy.tensor.grad is None:
        copy.tensor.grad = torch.zeros_like(copy.tensor)
    local_part("a tied weight", copy.tensor.grad).copy_(value)


def _state(tie: Tie, *, frozen: bool) -> Tensor:
    """(checksum of the values, whether the weight is frozen)."""
    values = _values(tie).contiguous()
    values = torch.view_as_real(values) if values.is_complex() else values
    checksum = values.view(_WHOLE_NUMBERS[values.itemsize]).sum(dtype=torch.int64)
    return torch.stack([checksum, torch.full_like(checksum, int(frozen))])


def _check_equal(tie: Tie, state: Tensor, ranks: tuple[int, int], *, frozen: bool) -> None:
    own = _state(tie, frozen=frozen)
    if torch.equal(own, state.to(own.device)):
        return
    here, there = ranks
    got = "other values" if own[1] == state[1] else "a frozen one in one of them"
    raise ValueError(
        f"a tied weight must be the same in all processes that have it, got {got} on ranks {here} and {there} for "
        f"'{tie.name}'; load and change it in both, and step with the same optimizer"
    )
