"""A vision transformer as a flat ``nn.Sequential`` of attentions and MLPs, so that a balance cuts anywhere.

    image ─ patches ─ (attention ─ mlp) x L ─ classifier

Dosovitskiy et al. (arXiv 2010.11929); layers normalise first, classes are read from the mean over the patches.
Attention is written out, matrix products and softmax, so that every device and version of PyTorch runs the same.
"""

from __future__ import annotations

import math
from collections import OrderedDict

import torch
from torch import Tensor, nn


class Patches(nn.Module):
    """Cuts images into patches and places them.

    Args:
        size: height and width of the images, in pixels.
        patch: of a patch.
        dim: width of the model.
    """

    def __init__(self, size: int, patch: int, dim: int) -> None:
        super().__init__()
        self.project = nn.Conv2d(3, dim, patch, stride=patch)
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2, dim) * 0.02)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, size, size) -> (N, patches, dim)."""
        patches: Tensor = self.project(images).flatten(2).transpose(1, 2)
        return patches + self.places


class Attention(nn.Module):
    """Self-attention with its normalisation and residual.

    Args:
        dim: width of the model, a multiple of ``heads``.
        heads: number of heads.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(N, patches, dim) -> the same shape."""
        batch, length, dim = x.shape
        parts: Tensor = self.qkv(self.norm(x))
        query, key, value = parts.view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (query @ key.transpose(-2, -1)) * (1 / math.sqrt(dim // self.heads))
        mixed = (scores.softmax(dim=-1) @ value).transpose(1, 2).reshape(batch, length, dim)
        out: Tensor = self.project(mixed)
        return x + out


class Mlp(nn.Module):
    """Two linear layers around a GELU, with normalisation and residual.

    Args:
        dim: width of the model; four times that inside.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """(N, patches, dim) -> the same shape."""
        out: Tensor = self.inner(x)
        return x + out


class Classifier(nn.Module):
    """Logits from the mean over the patches.

    Args:
        dim: width of the model.
        classes: number of classes.
    """

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.linear = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """(N, patches, dim) -> (N, classes)."""
        logits: Tensor = self.linear(self.norm(x).mean(dim=1))
        return logits


def vit(blocks: int, dim: int, heads: int, *, size: int, patch: int, classes: int) -> nn.Sequential:
    """The model with fresh weights: 2 L + 2 layers.

    Args:
        blocks: L, each an attention and an MLP.
        dim: width.
        heads: of the attention.
        size: height and width of the images, in pixels.
        patch: of a patch.
        classes: number of classes.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(patches=Patches(size, patch, dim))
    for block in range(blocks):
        layers[f"attention{block}"] = Attention(dim, heads)
        layers[f"mlp{block}"] = Mlp(dim)
    layers["classifier"] = Classifier(dim, classes)
    return nn.Sequential(layers)
