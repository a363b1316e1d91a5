"""A decoder that predicts several tokens: modules behind the last block predict the ones after the next one.

    tokens ─ embedding ─ block x L ─ h ─ module 1 ─ module 2 ─ ... ─ head ─ logits of each depth
               └─ tokens from the second one on ───────┘           │
               └─ tokens from the third one on ────────────────────┘

DeepSeek-V3 (arXiv 2412.19437), section 2.2: module k sees the state of the module before it and the embedding of the
token k places ahead, each normalised, behind a projection and a block. Embedding and head are those of the model, and
may have one weight, as in Llama 3.2 1B. A sequence has as many tokens more as there are modules. The modules take the
tokens as skips, from the first partition to the last.
"""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor, nn

from gpipe_bench.models.llama import Block, Head, Sizes, chained
from gpipe_bench.skip import pop, skippable, stash


class ShiftedEmbedding(nn.Module):
    """Vectors of the tokens, and for each module the tokens that it sees.

    Args:
        sizes: of the model.
        depth: number of modules.
    """

    def __init__(self, sizes: Sizes, depth: int) -> None:
        super().__init__()
        self.depth = depth
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)

    def forward(self, tokens: Tensor) -> Generator[stash, None, Tensor]:
        """(N, T + depth) of int64 -> (N, T, dim)."""
        length = tokens.shape[1] - self.depth
        for k in range(1, self.depth + 1):
            yield stash(f"tokens{k}", tokens[:, k : k + length])
        vectors: Tensor = self.tokens(tokens[:, :length])
        return vectors


class Ahead(nn.Module):
    """Module k, which predicts the token k places behind the next one.

    Args:
        sizes: of the model.
        k: counts from 1.
    """

    def __init__(self, sizes: Sizes, k: int) -> None:
        super().__init__()
        self.k = k
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.state_norm, self.token_norm = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.project = nn.Linear(2 * sizes.dim, sizes.dim, bias=False)
        self.block = Block(sizes)

    def forward(self, states: Tensor) -> Generator[pop, Tensor, Tensor]:
        """States of all depths so far, (N, k, T, dim), or of the model alone, (N, T, dim) -> (N, k + 1, T, dim)."""
        tokens = yield pop(f"tokens{self.k}")
        states = states.unsqueeze(1) if self.k == 1 else states
        both = self.state_norm(states[:, -1]), self.token_norm(self.tokens(tokens))
        ahead = self.block(self.project(torch.cat(both, -1)))
        return torch.cat([states, ahead.unsqueeze(1)], 1)


def multi_token(sizes: Sizes, depth: int, *, tied: bool) -> nn.Sequential:
    """The model with fresh weights: L + depth + 2 layers.

    Args:
        sizes: of the model.
        depth: number of modules, one or more.
        tied: whether the embedding, those of the modules and the head have one weight.
    """
    embedding = skippable(stash=[f"tokens{k}" for k in range(1, depth + 1)])(ShiftedEmbedding)(sizes, depth)
    blocks: list[nn.Module] = [Block(sizes) for _ in range(sizes.blocks)]
    ahead = [skippable(pop=[f"tokens{k}"])(Ahead)(sizes, k) for k in range(1, depth + 1)]
    head = Head(sizes)
    if tied:
        for layer in (*(module.tokens for module in ahead), head.linear):
            layer.weight = embedding.tokens.weight
    return chained(embedding, [*blocks, *ahead], head)
