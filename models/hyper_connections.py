"""A decoder with dynamic hyper-connections: n streams over every boundary in place of one.

    tokens ─ embedding ═ n copies ═ block x L ═ sum ─ head ─ logits

Zhu et al., "Hyper-Connections" (arXiv 2409.19606), algorithm 2. Before an attention or an MLP, weights that depend on
the streams mix them into its input and into each other. Behind it, other weights add its output to each stream. A
partition hands on all streams, n times as much as in :mod:`.llama`. Streams are normalised without weights, as in OLMo,
which the paper trains. The constraints of mHC (Xie et al., arXiv 2512.24880) on the weights are not here.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench.models.llama import Attention, Head, Mlp, Sizes, chained

_SCALE = 0.01


class HyperConnection(nn.Module):
    """Leads n streams around a module, and through it.

    Args:
        inner: takes and gives tensors of shape (N, T, dim).
        dim: width of the model.
        streams: n.
        place: number of the module in the model; before training it reads stream ``place`` modulo n.
    """

    def __init__(self, inner: nn.Module, dim: int, streams: int, place: int) -> None:
        super().__init__()
        self.inner = inner
        each = torch.eye(streams)
        self.static_mix = nn.Parameter(torch.cat([each[:, [place % streams]], each], 1))
        self.static_add = nn.Parameter(torch.ones(streams))
        self.mix, self.add = nn.Parameter(torch.zeros(dim, streams + 1)), nn.Parameter(torch.zeros(dim))
        self.mix_scale, self.add_scale = nn.Parameter(torch.tensor(_SCALE)), nn.Parameter(torch.tensor(_SCALE))

    def forward(self, x: Tensor) -> Tensor:
        """Streams of shape (N, T, n, dim) -> the same shape."""
        normed = functional.rms_norm(x, x.shape[-1:])
        mix = (normed @ self.mix).tanh() * self.mix_scale + self.static_mix
        add = (normed @ self.add).tanh() * self.add_scale + self.static_add
        mixed = mix.transpose(-1, -2) @ x
        added = self.inner(mixed[..., 0, :])
        out: Tensor = added.unsqueeze(-2) * add.unsqueeze(-1) + mixed[..., 1:, :]
        return out


class Copies(nn.Module):
    """An embedding, n times.

    Args:
        sizes: of the model.
        streams: n.
    """

    def __init__(self, sizes: Sizes, streams: int) -> None:
        super().__init__()
        self.streams = streams
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)

    def forward(self, tokens: Tensor) -> Tensor:
        """(N, T) of int64 -> (N, T, n, dim)."""
        vectors: Tensor = self.tokens(tokens)
        return vectors.unsqueeze(-2).repeat(1, 1, self.streams, 1)


class SummingHead(Head):
    """Logits of the next token from the sum of n streams, (N, T, n, dim)."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, T, n, dim) -> (N, T, vocabulary)."""
        return super().forward(x.sum(-2))


def hyper_connections(sizes: Sizes, streams: int) -> nn.Sequential:
    """The model with fresh weights: L + 2 layers.

    Args:
        sizes: of the model.
        streams: n.
    """

    def block(place: int) -> nn.Module:
        inner = Attention(sizes), Mlp(sizes)
        around = [HyperConnection(part, sizes.dim, streams, 2 * place + k) for k, part in enumerate(inner)]
        return nn.Sequential(*around)

    return chained(Copies(sizes, streams), [block(place) for place in range(sizes.blocks)], SummingHead(sizes))
