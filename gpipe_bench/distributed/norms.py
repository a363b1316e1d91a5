"""The norm of gradients that several processes have, with the bits that one process would find.

``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters' norms. So processes tell each other the norm of
each parameter, and take the norm of all, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

Norms = tuple[Tensor, list[list[torch.dtype]]]
"""Those of one process, and for each partition the types of its gradients."""


@torch.no_grad()
def norms_of(partitions: Iterable[Iterable[nn.Parameter]], norm_type: float) -> Norms:
    """The norm of each gradient; that of a DTensor is of the whole one, so all processes of its mesh must call this.

    Args:
        partitions: for each partition the parameters that count.
        norm_type: of the p-norm.
    """
    norms, kinds = [], []
    for parameters in partitions:
        grads: list[Any] = [parameter.grad for parameter in parameters if parameter.grad is not None]
        kinds.append([grad.dtype for grad in grads])
        # One by one: gradients of several types do not go through one kernel.
        found = [torch._foreach_norm([grad], float(norm_type))[0] for grad in grads]  # noqa: SLF001 - public, for all its name
        norms += [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in found]
    # All numbers of the smaller types are among those of the largest one.
    none = torch.empty(0, dtype=torch.float64, device="cpu")
    return (torch.stack(norms).to("cpu", torch.float64) if norms else none), kinds


def total_norm(found: Sequence[Norms], ranks: Sequence[int], norm_type: float, device: torch.device) -> Tensor:
    """The norm of all gradients.

    Args:
        found: what :func:`norms_of` gives in each process.
        ranks: for each partition the rank of its process.
        norm_type: of the p-norm.
        device: of the result.
    """
    rest = [iter(norms) for norms, _ in found]
    ordered = [(next(rest[rank]), kind) for j, rank in enumerate(ranks) for kind in found[rank][1][j]]
    if not ordered:
        return torch.tensor(0.0, device=device)
    # PyTorch sorts gradients by type, in an order that only this function knows.
    alike: Any = [[torch.empty(0, dtype=kind, device=device) for _, kind in ordered]]
    groups = _group_tensors_by_device_and_dtype(alike, with_indices=True).values()
    sorted_norms = [ordered[index] for _, indices in groups for index in indices]
    stacked = torch.stack([norm.to(device, kind.to_real()) for norm, kind in sorted_norms])
    total: Tensor = torch.linalg.vector_norm(stacked, float(norm_type))
    return total


@torch.no_grad()
def clip(parameters: Iterable[Any], max_norm: float, total: Tensor) -> None:
    """As ``torch.nn.utils.clip_grads_with_norm_``, which refuses DTensors beside other gradients."""
    # The shards of a DTensor are multiplied one by one, once a collective has filled them.
    grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
    parts = [grad.to_local() if hasattr(grad, "to_local") else grad for grad in grads]
    holders: Any = [SimpleNamespace(grad=part.wait() if hasattr(part, "wait") else part) for part in parts]
    nn.utils.clip_grads_with_norm_(holders, max_norm, total)
