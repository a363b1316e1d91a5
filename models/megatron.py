"""BERT and GPT-2 as Megatron-LM and LiBai trained them: attention is two products with a softmax between them.

    tokens ─ embedding ─ (attention ─ mlp) x L ─ head ─ logits

Shoeybi et al. (arXiv 1909.08053): layers of BERT normalise first, too. Sentences have no types and no second loss here.
"""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn

from gpipe_bench.models.gpt2 import Attention, Embedding, Head, Mlp


class WrittenOutAttention(Attention):
    """Self-attention that keeps the scores of all pairs of tokens.

    Args:
        dim: width of the model, a multiple of ``heads``.
        heads: number of heads.
        dropout: probability that a weight of the attention, or a number of the result, is dropped.
        causal: whether a token sees only those before it and itself.
    """

    def __init__(self, dim: int, heads: int, dropout: float, *, causal: bool) -> None:
        super().__init__(dim, heads, dropout)
        self.causal = causal

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, dim) -> the same shape."""
        batch, length, dim = x.shape
        width = dim // self.heads
        parts: Tensor = self.qkv(self.norm(x))
        heads = parts.view(batch, length, 3, self.heads, width).permute(2, 0, 3, 1, 4)
        query, key, value = heads.reshape(3, batch * self.heads, length, width).unbind(0)
        hidden = torch.full((length, length), float("-inf"), dtype=x.dtype, device=x.device).triu(1)
        scores = torch.baddbmm(hidden, query, key.transpose(1, 2), beta=float(self.causal), alpha=width**-0.5)
        mixed = self.dropout(scores.softmax(-1)) @ value
        mixed = mixed.view(batch, self.heads, length, width).transpose(1, 2).reshape(batch, length, dim)
        out: Tensor = self.dropout(self.project(mixed))
        return x + out


def megatron(
    blocks: int, dim: int, heads: int, *, vocabulary: int, context: int, dropout: float, causal: bool
) -> nn.Sequential:
    """The model with fresh weights: 2 L + 2 layers.

    Args:
        blocks: L, each an attention and an MLP.
        dim: width.
        heads: of the attention.
        vocabulary: number of tokens.
        context: tokens of a sequence.
        dropout: probability; published 0.1.
        causal: GPT-2, else BERT.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(embedding=Embedding(vocabulary, context, dim, dropout))
    for block in range(blocks):
        layers[f"attention{block}"] = WrittenOutAttention(dim, heads, dropout, causal=causal)
        layers[f"mlp{block}"] = Mlp(dim, dropout)
    hidden = nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.LayerNorm(dim)
    layers["head"] = Head(dim, vocabulary) if causal else nn.Sequential(*hidden, nn.Linear(dim, vocabulary))
    return nn.Sequential(layers)
