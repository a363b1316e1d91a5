"""Layers of many kinds, to be simulated."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.skip import pop, skippable, stash

WIDTH, LENGTH = 16, 8


class Attention(nn.Module):
    """Scaled dot-product attention, as a model writes it by hand."""

    def __init__(self, *, causal: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.causal = causal

    def forward(self, x):
        batch, length, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).reshape(batch, length, WIDTH)


class MultiheadAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options) -> None:
        super().__init__()
        self.inside = kind(WIDTH, WIDTH, batch_first=True, **options)

    def forward(self, x):
        return self.inside(x)[0]


class Split(nn.Module):
    """One tensor in, a tuple out."""

    def forward(self, x):
        return x, x.mean(1)


class Merge(nn.Module):
    """A tuple in, one tensor out."""

    def forward(self, values):
        first, second = values
        return first * second.unsqueeze(1)


class Named(nn.Module):
    """A dictionary out."""

    def forward(self, x):
        return {"double": 2 * x, "same": x}


class Unnamed(nn.Module):
    """A dictionary in."""

    def forward(self, values):
        return values["double"] - values["same"]


class Function(nn.Module):
    """Any function as a layer."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


class Scaled(nn.Module):
    """A tensor that is no parameter, no buffer and no leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))
        self.scale = 2 * self.weight

    def forward(self, x):
        return x * self.scale


@skippable(stash=["far"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("far", x)
        return x.relu()


@skippable(pop=["far"])
class Pop(nn.Module):
    def forward(self, x):
        far = yield pop("far")
        return x + far


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def sequence() -> torch.Tensor:
    return torch.empty(1, LENGTH, WIDTH, device="meta")


def image() -> torch.Tensor:
    return torch.empty(1, 3, 16, 16, device="meta")


def words() -> torch.Tensor:
    return torch.zeros(1, LENGTH, dtype=torch.int64)
