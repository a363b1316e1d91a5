"""A model of one's own, as docs/models.md uses it: a residual network on vectors, its batch and its loss."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Residual(nn.Module):
    """Adds what two linear layers make of the input to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(N, width) -> (N, width)."""
        out: Tensor = x + self.inner(x)
        return out


def residual(width: int = 256, depth: int = 8, classes: int = 10) -> nn.Sequential:
    """The model: depth + 1 layers."""
    return nn.Sequential(*(Residual(width) for _ in range(depth)), nn.Linear(width, classes))


def residual_batch(batch_size: int, width: int = 256, classes: int = 10) -> tuple[Tensor, Tensor]:
    """Made-up inputs and their classes; it takes those arguments of the model that it needs."""
    return torch.rand(batch_size, width), torch.randint(classes, (batch_size,))


def residual_loss(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over the classes."""
    return functional.cross_entropy(output, target)
