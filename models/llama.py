"""Llama, a decoder-only transformer with rotary positions and gated MLPs, as a flat ``nn.Sequential``.

    tokens ─ embedding ─ block x L ─ head ─ logits

Touvron et al. (arXiv 2302.13971). Since Llama 3 several heads of queries share one of keys and values (grouped-query
attention, Ainslie et al., arXiv 2305.13245; Grattafiori et al., arXiv 2407.21783). A block is one layer. The head has a
weight of its own, as in :mod:`.gpt2`. The other decoders are made of the parts of this one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

LLAMA_BASE = 10_000.0
LLAMA_3_BASE = 500_000.0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The numbers that a decoder is made with.

    Attributes:
        blocks: how many there are, each an attention and an MLP.
        dim: width of the model, a multiple of ``heads``.
        heads: heads of queries, a multiple of ``kv_heads``.
        kv_heads: heads of keys and of values.
        hidden: width inside an MLP.
        vocabulary: number of tokens.
        base: of the rotary positions.
    """

    blocks: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    base: float = LLAMA_3_BASE


class Attention(nn.Module):
    """Causal self-attention behind a normalisation, without a residual.

    Args:
        sizes: of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        self.base = sizes.base
        self.norm = nn.RMSNorm(sizes.dim)
        self.qkv = nn.Linear(sizes.dim, sizes.dim // sizes.heads * sum(self.heads), bias=False)
        self.project = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> the same shape; a token sees those before it and itself."""
        heads: Tensor = self.qkv(self.norm(x)).unflatten(-1, (sum(self.heads), -1))
        query, key, value = torch.split(heads.transpose(1, 2), self.heads, 1)
        query, key = _rotated(query, self.base), _rotated(key, self.base)
        grouped = query.shape[1] > key.shape[1]
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        out: Tensor = self.project(mixed.transpose(1, 2).reshape(x.shape))
        return out


class Mlp(nn.Module):
    """A gated MLP behind a normalisation, without a residual.

    Args:
        sizes: of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.dim)
        self.gate_up = nn.Linear(sizes.dim, 2 * sizes.hidden, bias=False)
        self.down = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> the same shape."""
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        out: Tensor = self.down(functional.silu(gate) * up)
        return out


class Block(nn.Module):
    """An attention and an MLP, each with its residual.

    Args:
        sizes: of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(sizes), Mlp(sizes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> the same shape."""
        x = x + self.attention(x)
        out: Tensor = x + self.mlp(x)
        return out


class Head(nn.Module):
    """Logits of the next token.

    Args:
        sizes: of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(sizes.dim)
        self.linear = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) -> (..., vocabulary)."""
        logits: Tensor = self.linear(self.norm(x))
        return logits


def _rotated(x: Tensor, base: float) -> Tensor:
    """(N, heads, T, width) with each pair of numbers turned by an angle that grows with its place in the sequence."""
    length, half = x.shape[-2], x.shape[-1] // 2
    places = torch.arange(length, device=x.device, dtype=torch.float32)
    speeds = base ** -torch.arange(0, 1, 1 / half, device=x.device, dtype=torch.float32)[:half]
    angles = torch.outer(places, speeds)
    cosines, sines = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosines - second * sines, second * cosines + first * sines), -1)


def decoder(sizes: Sizes) -> nn.Sequential:
    """The model with fresh weights: L + 2 layers.

    Args:
        sizes: of the model.
    """
    return chained(nn.Embedding(sizes.vocabulary, sizes.dim), [Block(sizes) for _ in range(sizes.blocks)], Head(sizes))


def chained(embedding: nn.Module, blocks: Sequence[nn.Module], head: nn.Module) -> nn.Sequential:
    """The layers of a decoder under their names."""
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=embedding)
    layers |= {f"block{place}": block for place, block in enumerate(blocks)}
    layers["head"] = head
    return nn.Sequential(layers)
