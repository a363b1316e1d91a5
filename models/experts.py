"""A decoder whose MLPs are mixtures of experts of fixed capacity, with a loss that balances them.

    tokens ─ embedding ─ (x, balance) ─ block x L ─ head ─ (logits, balance)

A router sends each token to its k most probable experts. An expert takes a fixed number of tokens of each sequence. It
leaves out the tokens that come when it is full (GShard, Lepikhin et al., arXiv 2006.16668, algorithm 1; its group is a
sequence here). The balancing loss is that of Switch Transformers (Fedus et al., arXiv 2101.03961, equation 4), for each
sequence. It is a number for each sample, which travels beside the activations, and every block adds to it. So it is cut
into micro-batches as the batch is, and gives the gradients of the plain module. The probabilities of the k experts sum
to 1, as in Mixtral (Jiang et al., arXiv 2401.04088).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench.models.llama import Attention, Head, Sizes, chained

Values = tuple[Tensor, Tensor]
"""Activations of shape (N, T, dim), and a loss of shape (N,)."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """How experts are chosen.

    Attributes:
        experts: how many there are in each block.
        chosen: k, experts of a token.
        capacity: tokens that an expert takes, times the number that each would get if all got as many.
    """

    experts: int
    chosen: int
    capacity: float


class Experts(nn.Module):
    """Gated MLPs behind a normalisation and a router, without a residual.

    Args:
        sizes: of the model.
        mixture: how experts are chosen.
    """

    def __init__(self, sizes: Sizes, mixture: Mixture) -> None:
        super().__init__()
        self.mixture = mixture
        self.norm = nn.RMSNorm(sizes.dim)
        self.router = nn.Linear(sizes.dim, mixture.experts, bias=False)
        self.gate_up = nn.Parameter(torch.empty(mixture.experts, sizes.dim, 2 * sizes.hidden))
        self.down = nn.Parameter(torch.empty(mixture.experts, sizes.hidden, sizes.dim))
        for weight in (self.gate_up, self.down):
            nn.init.uniform_(weight, -(weight.shape[1] ** -0.5), weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> Values:
        """(N, T, dim) -> the same shape, and the balancing loss of each sequence, (N,)."""
        samples, length, dim = x.shape
        experts, chosen = self.mixture.experts, self.mixture.chosen
        capacity = min(length, ceil(self.mixture.capacity * chosen * length / experts))
        x = self.norm(x)
        probabilities = self.router(x).softmax(-1)
        weights, choices = probabilities.topk(chosen)
        weights = weights / weights.sum(-1, keepdim=True)

        # First choices come before second ones, and early tokens before late ones.
        choices = choices.transpose(1, 2).flatten(1)
        sent = choices.unsqueeze(-1) == torch.arange(experts, device=x.device)
        place = (sent.cumsum(1) * sent).sum(-1) - 1
        slot = choices * capacity + place
        slot = torch.where(place < capacity, slot, experts * capacity)

        # One slot more, whose tokens no expert sees.
        tokens = torch.arange(length, device=x.device).repeat(chosen).expand_as(slot)
        taken = torch.full((samples, experts * capacity + 1), length, device=x.device).scatter(1, slot, tokens)
        padded = functional.pad(x, (0, 0, 0, 1))
        inputs = padded.gather(1, taken[:, :-1, None].expand(-1, -1, dim)).view(samples, experts, capacity, dim)
        gate, up = (inputs @ self.gate_up).chunk(2, -1)
        outputs = functional.pad(((functional.silu(gate) * up) @ self.down).flatten(1, 2), (0, 0, 0, 1))
        back = outputs.gather(1, slot[:, :, None].expand(-1, -1, dim)).view(samples, chosen, length, dim)
        mixed = (back * weights.transpose(1, 2).unsqueeze(-1)).sum(1)

        share = sent.to(x.dtype).mean(1)
        return mixed, experts * (share * probabilities.mean(1)).sum(-1)


class ExpertBlock(nn.Module):
    """An attention and experts, each with its residual.

    Args:
        sizes: of the model.
        mixture: how experts are chosen.
    """

    def __init__(self, sizes: Sizes, mixture: Mixture) -> None:
        super().__init__()
        self.attention, self.experts = Attention(sizes), Experts(sizes, mixture)

    def forward(self, values: Values) -> Values:
        """Activations and the loss so far -> the same."""
        x, balance = values
        x = x + self.attention(x)
        mixed, added = self.experts(x)
        return x + mixed, balance + added


class Entry(nn.Module):
    """Vectors of tokens, beside a loss of zero.

    Args:
        sizes: of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)

    def forward(self, tokens: Tensor) -> Values:
        """(N, T) of int64 -> (N, T, dim), and zeros of shape (N,)."""
        vectors: Tensor = self.tokens(tokens)
        return vectors, vectors.new_zeros(len(vectors))


class Exit(nn.Module):
    """Logits of the next token, beside the loss of all blocks.

    Args:
        sizes: of the model.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = Head(sizes)

    def forward(self, values: Values) -> Values:
        """(N, T, dim) and (N,) -> (N, T, vocabulary) and (N,)."""
        x, balance = values
        return self.head(x), balance


def experts(sizes: Sizes, mixture: Mixture) -> nn.Sequential:
    """The model with fresh weights: L + 2 layers.

    Args:
        sizes: of the model; ``hidden`` is the width inside an expert.
        mixture: how experts are chosen.
    """
    blocks: list[nn.Module] = [ExpertBlock(sizes, mixture) for _ in range(sizes.blocks)]
    return chained(Entry(sizes), blocks, Exit(sizes))
