"""Llama, a decoder-only transformer with rotary positions and gated MLPs, as a flat ``nn.Sequential``.

    tokens ─ embedding ─ block x L ─ head ─ logits

Touvron et al. (arXiv 2302.13971). A block is one layer. The head has a weight of its own, as in :mod:`.gpt2`.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

_BASE = 10_000.0


class Block(nn.Module):
    """Causal self-attention and a gated MLP, each with its normalisation and residual.

    Args:
        dim: width of the model, a multiple of ``heads``.
        heads: number of heads.
        hidden: width inside the MLP.
    """

    def __init__(self, dim: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.qkv, self.project = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> the same shape; a token sees those before it and itself."""
        batch, length, dim = x.shape
        heads: Tensor = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = _rotated(query), _rotated(key)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(batch, length, dim))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        out: Tensor = x + self.down(functional.silu(gate) * up)
        return out


def _rotated(x: Tensor) -> Tensor:
    """(N, heads, T, width) with each pair of numbers turned by an angle that grows with its place in the sequence."""
    length, half = x.shape[-2], x.shape[-1] // 2
    places = torch.arange(length, device=x.device, dtype=torch.float32)
    speeds = _BASE ** -torch.arange(0, 1, 1 / half, device=x.device, dtype=torch.float32)[:half]
    angles = torch.outer(places, speeds)
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def llama(blocks: int, dim: int, heads: int, *, hidden: int, vocabulary: int) -> nn.Sequential:
    """The model with fresh weights: L + 2 layers.

    Args:
        blocks: L.
        dim: width.
        heads: of the attention.
        hidden: width inside the MLPs.
        vocabulary: number of tokens.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=nn.Embedding(vocabulary, dim))
    layers |= {f"block{block}": Block(dim, heads, hidden) for block in range(blocks)}
    layers["head"] = nn.Sequential(nn.RMSNorm(dim), nn.Linear(dim, vocabulary, bias=False))
    return nn.Sequential(layers)
