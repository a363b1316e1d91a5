"""A vision encoder whose image states reach blocks all along a decoder, by cross-attention.

    pixels ─ patches ─ block x V ─ image states ─┬───────────┬───────────┬─ ...
                                                 │           │           │
    tokens ────────────────────── embedding ─ block 0 ─── block 1 ─── block 2 ─ ... ─ head ─ logits

The adapter of Llama 3 (Grattafiori et al., arXiv 2407.21783, section 7): cross-attention between the layers of a
decoder of text, with gates that begin at zero (Alayrac et al., arXiv 2204.14198). Llama 3 has one after every fourth
layer; the sizes here are ours. The encoder is that of :mod:`.vit`, the decoder that of :mod:`.llama`. A sample is one
row of integers: the values of its pixels from 0 to 255, and then its tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench.models import vit
from gpipe_bench.models.llama import Block, Head, Sizes
from gpipe_bench.skip import Skippable, peek, pop, skippable, stash


@dataclass(frozen=True, slots=True)
class Picture:
    """The numbers that an encoder is made with.

    Attributes:
        blocks: how many there are.
        dim: width of the encoder, a multiple of ``heads``.
        heads: of its attention.
        size: height and width of the images, in pixels, a multiple of ``patch``.
        patch: height and width of a patch, in pixels.
    """

    blocks: int
    dim: int
    heads: int
    size: int
    patch: int

    @property
    def pixels(self) -> int:
        """Numbers of an image, of three channels."""
        return 3 * self.size**2


@skippable(stash=["tokens"])
class Entry(nn.Module, Skippable):
    """Vectors of the patches of an image; its tokens are for later.

    Args:
        picture: sizes of the encoder.
    """

    def __init__(self, picture: Picture) -> None:
        super().__init__()
        self.picture = picture
        self.patches = vit.Patches(picture.size, picture.patch, picture.dim)

    def forward(self, rows: Tensor) -> Generator[stash, None, Tensor]:
        """(N, pixels + T) of int64 -> (N, patches, encoder's dim)."""
        pixels, tokens = rows[:, : self.picture.pixels], rows[:, self.picture.pixels :]
        yield stash("tokens", tokens)
        size = self.picture.size
        images = pixels.to(self.patches.places.dtype).view(-1, 3, size, size) / 255
        patches: Tensor = self.patches(images)
        return patches


@skippable(stash=["image"], pop=["tokens"])
class Change(nn.Module, Skippable):
    """From image to text: stashes the image states for the blocks that read them, and embeds the tokens.

    Args:
        picture: sizes of the encoder.
        sizes: of the decoder.
    """

    def __init__(self, picture: Picture, sizes: Sizes) -> None:
        super().__init__()
        self.norm, self.project = nn.LayerNorm(picture.dim), nn.Linear(picture.dim, sizes.dim)
        self.tokens = nn.Embedding(sizes.vocabulary, sizes.dim)

    def forward(self, patches: Tensor) -> Generator[stash | pop, Tensor, Tensor]:
        """(N, patches, encoder's dim) -> (N, T, dim)."""
        states = self.project(self.norm(patches))
        tokens = yield pop("tokens")
        yield stash("image", states)
        vectors: Tensor = self.tokens(tokens)
        return vectors


class CrossAttention(nn.Module):
    """Tokens look at an image; with a gate, without a residual.

    Args:
        sizes: of the decoder.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads, sizes.kv_heads
        width = sizes.dim // sizes.heads
        self.norm = nn.RMSNorm(sizes.dim)
        self.query = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.keys_values = nn.Linear(sizes.dim, 2 * sizes.kv_heads * width, bias=False)
        self.project = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.gate = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        """Tokens (N, T, dim) and image states (N, P, dim) -> (N, T, dim)."""
        heads, kv_heads = self.heads
        query = self.query(self.norm(x)).unflatten(-1, (heads, -1)).transpose(1, 2)
        key, value = self.keys_values(image).unflatten(-1, (2 * kv_heads, -1)).transpose(1, 2).chunk(2, 1)
        mixed = functional.scaled_dot_product_attention(query, key, value, enable_gqa=heads > kv_heads)
        out: Tensor = self.gate.tanh() * self.project(mixed.transpose(1, 2).reshape(x.shape))
        return out


@skippable(peek=["image"])
class SeeingBlock(nn.Module, Skippable):
    """A block of the decoder that looks at the image first.

    Args:
        sizes: of the decoder.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.cross, self.block = CrossAttention(sizes), Block(sizes)

    def forward(self, x: Tensor) -> Generator[peek, Tensor, Tensor]:
        """(N, T, dim) -> the same shape."""
        image = yield peek("image")
        out: Tensor = self.block(x + self.cross(x, image))
        return out


def captions(picture: Picture, sizes: Sizes, every: int) -> nn.Sequential:
    """The model with fresh weights: V + L + 3 layers.

    Args:
        picture: sizes of the encoder; V are its blocks.
        sizes: of the decoder; L are its blocks.
        every: blocks of the decoder from one that looks at the image to the next; 1 for all.
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict(entry=Entry(picture))
    for place in range(picture.blocks):
        parts = vit.Attention(picture.dim, picture.heads), vit.Mlp(picture.dim)
        layers[f"encoder{place}"] = nn.Sequential(*parts)
    layers["change"] = Change(picture, sizes)
    for place in range(sizes.blocks):
        layers[f"block{place}"] = Block(sizes) if place % every else SeeingBlock(sizes)
    layers["head"] = Head(sizes)
    return nn.Sequential(layers)
