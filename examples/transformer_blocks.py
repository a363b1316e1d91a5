"""Transformer blocks without embedding and head, as they were measured in pipelines on one H200.

docs/simulator_errors.md compares their measured and their simulated steps.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Block(nn.Module):
    """Causal attention and two linear layers around a GELU, each with its norm and residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """(samples, tokens, width) to the same."""
        samples, tokens, width = x.shape
        heads = self.qkv(self.before(x)).view(samples, tokens, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(samples, tokens, width))
        result: Tensor = x + self.mlp(self.between(x))
        return result


def blocks(count: int = 24, width: int = 1024, heads: int = 8, tokens: int = 512) -> nn.Sequential:
    """The model; ``tokens`` is for its batch."""
    del tokens
    return nn.Sequential(*(Block(width, heads) for _ in range(count)))


def blocks_batch(batch_size: int, tokens: int = 512, width: int = 1024) -> tuple[Tensor, Tensor]:
    """Inputs, and targets that the loss does not look at."""
    return torch.rand(batch_size, tokens, width), torch.zeros(batch_size)


def blocks_loss(output: Tensor, _target: Tensor) -> Tensor:
    """The mean of the squares."""
    return output.float().square().mean()
