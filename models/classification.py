"""Target and loss of models that tell classes apart; what touches tensors loads PyTorch on its first call."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpipe_bench.models.arguments import Values

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from gpipe_bench.models.spec import Device


def class_labels(batch_size: int, arguments: Values, generator: torch.Generator | None, device: Device) -> Tensor:
    """Made-up classes, shape (batch size,), each below the argument ``classes``."""
    import torch

    return torch.randint(int(arguments["classes"]), (batch_size,), generator=generator, device=device)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Mean over the batch: logits of shape (batch size, classes), classes of shape (batch size,)."""
    from torch.nn import functional

    return functional.cross_entropy(output, target)
