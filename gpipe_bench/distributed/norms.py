"""The norm of gradients that several processes have, with the bits that one process would find.

``torch.nn.utils.clip_grad_norm_`` takes the norm of the parameters' norms. So processes tell each other the norm of
each parameter, and take the norm of all, in the order of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype


def norms(grads: Sequence[Any], norm_type: float) -> list[Tensor]:
    """The norm of each gradient; that of a DTensor is of the whole one, so all processes of its mesh must call this."""
    with torch.no_grad():
        # One by one: gradients of several types do not go through one kernel.
        found = [torch._foreach_norm([grad], float(norm_type))[0] for grad in grads]  # noqa: SLF001 - public, for all its name
        return [norm.full_tensor() if hasattr(norm, "full_tensor") else norm for norm in found]


def total_norm(found: Sequence[tuple[Tensor, torch.dtype]], norm_type: float, device: torch.device) -> Tensor:
    """The norm of the norms of all gradients, each given with the type of its gradient, in the order of the model."""
    if not found:
        return torch.tensor(0.0)
    # PyTorch sorts gradients by type, in an order that only this function knows.
    kinds: Any = [[torch.empty(0, dtype=dtype, device=device) for _, dtype in found]]
    groups = _group_tensors_by_device_and_dtype(kinds, with_indices=True).values()
    ordered = [found[index] for _, indices in groups for index in indices]
    stacked = torch.stack([norm.to(device, dtype.to_real()) for norm, dtype in ordered])
    total: Tensor = torch.linalg.vector_norm(stacked, float(norm_type))
    return total
