"""A model of one's own, with its batch and its loss; docs/models.md shows what can be done with it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


def mlp(width: int = 256, depth: int = 8, classes: int = 10) -> nn.Sequential:
    """The model: depth + 1 layers, which a balance shares out."""
    hidden = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def mlp_batch(batch_size: int, width: int = 256, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Inputs and targets; the function is given those arguments of the model that it names."""
    return torch.rand(batch_size, width), torch.randint(classes, (batch_size,))


def mlp_loss(output: Tensor, target: Tensor) -> Tensor:
    """One number, of the output of the whole batch."""
    return functional.cross_entropy(output, target)
