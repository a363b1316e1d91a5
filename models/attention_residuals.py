"""A decoder with Block Attention Residuals: in place of a sum, a softmax over depth mixes what earlier blocks gave.

    embedding = b0 ─ layers of block 0 ─ b1 ─ layers of block 1 ─ b2 ─ ... ─ head
                └────────────┴────────────┴────────────┴─── every later layer reads b0, b1, ... ──┘

Kimi Team, "Attention Residuals" (arXiv 2603.15031), figure 2. A block is several transformer layers, whose outputs are
summed as usual. Before each attention and each MLP, and in the head, a softmax weighs the outputs of all earlier blocks
and the sum so far, by a learned query and normalised keys. So each block's output is a skip, which every later layer
reads, whatever partition it is in. The report of Kimi K3 mixes again in the backward pass, so that a layer keeps what
one with plain residuals keeps. The layers are those of :mod:`.llama`; which sizes go with them is ours.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_bench.models.llama import Attention, Head, Mlp, Sizes, chained
from gpipe_bench.skip import peek, pop, skippable, stash


class DepthAttention(nn.Module):
    """Mixes tensors of several depths.

    Args:
        dim: width of the model.
        recompute: whether the backward pass mixes again, so that nothing but the depths is kept until then.
    """

    def __init__(self, dim: int, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        # All depths count alike before training, as the paper asks for.
        self.query = nn.Parameter(torch.zeros(dim))
        self.norm = nn.RMSNorm(dim)

    def forward(self, sources: Sequence[Tensor]) -> Tensor:
        """Tensors of shape (N, T, dim) -> one of this shape."""
        if not self.recompute:
            return self._mixed(*sources)
        mixed: Tensor = checkpoint(self._mixed, *sources, use_reentrant=False, preserve_rng_state=False)
        return mixed

    def _mixed(self, *sources: Tensor) -> Tensor:
        values = torch.stack(sources)
        weights = (self.norm(values) @ self.query).softmax(0)
        return torch.einsum("snt,sntd->ntd", weights, values)


class Layer(nn.Module):
    """A transformer layer that mixes depths before its attention and before its MLP.

    Args:
        sizes: of the model.
        reads: names of the skips that hold the outputs of earlier blocks, the first one first.
        begins: name under which a layer that begins a block stashes its input, the output of the block before; else
            empty.
        recompute: as in :class:`DepthAttention`.
    """

    def __init__(self, sizes: Sizes, reads: Sequence[str], begins: str, *, recompute: bool) -> None:
        super().__init__()
        self.reads, self.begins = tuple(reads), begins
        self.before_attention = DepthAttention(sizes.dim, recompute=recompute)
        self.before_mlp = DepthAttention(sizes.dim, recompute=recompute)
        self.attention, self.mlp = Attention(sizes), Mlp(sizes)

    def forward(self, x: Tensor) -> Generator[stash | peek, Tensor, Tensor]:
        """The sum within a block so far, (N, T, dim), or the output of the block before -> the sum within the block."""
        earlier = []
        for name in self.reads:
            earlier.append((yield peek(name)))  # noqa: PERF401 - a generator
        if self.begins:
            yield stash(self.begins, x)
        added = self.attention(self.before_attention([*earlier, x]))
        earlier, x = ([*earlier, x], added) if self.begins else (earlier, x + added)
        out: Tensor = x + self.mlp(self.before_mlp([*earlier, x]))
        return out


class DepthHead(nn.Module):
    """Logits of the next token, from all depths.

    Args:
        sizes: of the model.
        reads: as in :class:`Layer`.
        recompute: as in :class:`DepthAttention`.
    """

    def __init__(self, sizes: Sizes, reads: Sequence[str], *, recompute: bool) -> None:
        super().__init__()
        self.reads = tuple(reads)
        self.mix, self.head = DepthAttention(sizes.dim, recompute=recompute), Head(sizes)

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        """(N, T, dim) -> (N, T, vocabulary)."""
        earlier = []
        for name in self.reads:
            earlier.append((yield pop(name)))  # noqa: PERF401 - a generator
        logits: Tensor = self.head(self.mix([*earlier, x]))
        return logits


def attention_residuals(sizes: Sizes, block: int, *, recompute: bool) -> nn.Sequential:
    """The model with fresh weights: L + 2 layers.

    Args:
        sizes: of the model; its ``blocks`` are the transformer layers.
        block: transformer layers in each block over whose outputs depth is mixed.
        recompute: as in :class:`DepthAttention`.
    """
    layers: list[nn.Module] = []
    names: list[str] = []
    for place in range(sizes.blocks):
        begun = [f"b{len(names)}"] if place % block == 0 else []
        layer = skippable(stash=begun, peek=names)(Layer)
        layers.append(layer(sizes, names, "".join(begun), recompute=recompute))
        names += begun
    head = skippable(pop=names)(DepthHead)(sizes, names, recompute=recompute)
    return chained(nn.Embedding(sizes.vocabulary, sizes.dim), layers, head)
