"""GPT-2, a decoder-only transformer, as a flat ``nn.Sequential`` of attentions and MLPs: a balance cuts anywhere.

    tokens ─ embedding ─ (attention ─ mlp) x L ─ head ─ logits

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019): layers normalise first, MLPs are four
times as wide, GELU is its tanh approximation. The published model uses the token embedding as the weight of the head,
too. The head has a weight of its own here: GPT-2 small has 124,439,808 parameters with a shared weight, and 50,257 x
768 more, 163,037,184, without.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

_DEVIATION = 0.02


class Embedding(nn.Module):
    """Tokens and places as vectors.

    Args:
        vocabulary: number of tokens.
        context: tokens of a sequence at most.
        dim: width of the model.
        dropout: probability that a number is dropped.
    """

    def __init__(self, vocabulary: int, context: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.places = nn.Embedding(context, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) of int64 -> (N, T, dim)."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        out: Tensor = self.dropout(self.tokens(tokens) + self.places(places))
        return out


class Attention(nn.Module):
    """Causal self-attention with its normalisation and residual.

    Args:
        dim: width of the model, a multiple of ``heads``.
        heads: number of heads.
        dropout: probability that a weight of the attention, or a number of the result, is dropped.
    """

    def __init__(self, dim: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> the same shape; a token sees those before it and itself."""
        batch, length, dim = x.shape
        parts: Tensor = self.qkv(self.norm(x))
        query, key, value = parts.view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        dropped = self.dropout.p if self.training else 0.0
        mixed = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropped, is_causal=True)
        out: Tensor = self.dropout(self.project(mixed.transpose(1, 2).reshape(batch, length, dim)))
        return x + out


class Mlp(nn.Module):
    """Two linear layers around a GELU, with normalisation and residual.

    Args:
        dim: width of the model; four times that inside.
        dropout: probability that a number of the result is dropped.
    """

    def __init__(self, dim: int, dropout: float) -> None:
        super().__init__()
        self.inner = nn.Sequential(
            nn.LayerNorm(dim),
            nn.Linear(dim, 4 * dim),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> the same shape."""
        out: Tensor = self.inner(x)
        return x + out


class Head(nn.Module):
    """Logits of the next token.

    Args:
        dim: width of the model.
        vocabulary: number of tokens.
    """

    def __init__(self, dim: int, vocabulary: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> (N, T, vocabulary)."""
        logits: Tensor = self.linear(self.norm(x))
        return logits


def gpt2(blocks: int, dim: int, heads: int, *, vocabulary: int, context: int, dropout: float) -> nn.Sequential:
    """The model with fresh weights: 2 L + 2 layers.

    Args:
        blocks: L, each an attention and an MLP.
        dim: width.
        heads: of the attention.
        vocabulary: number of tokens.
        context: tokens of a sequence.
        dropout: probability; published 0.1.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=Embedding(vocabulary, context, dim, dropout))
    for block in range(blocks):
        layers[f"attention{block}"] = Attention(dim, heads, dropout)
        layers[f"mlp{block}"] = Mlp(dim, dropout)
    layers["head"] = Head(dim, vocabulary)
    model = nn.Sequential(layers)
    # What ends on the residual is made smaller, so that the sum over all blocks has the size of one.
    small = {id(module) for layer in model for module in _last(layer)}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = (2 * blocks) ** -0.5 if id(module) in small else 1.0
            nn.init.normal_(module.weight, std=_DEVIATION * scale)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    return model


def _last(layer: nn.Module) -> list[nn.Module]:
    if isinstance(layer, Attention):
        return [layer.project]
    return [layer.inner[3]] if isinstance(layer, Mlp) else []
