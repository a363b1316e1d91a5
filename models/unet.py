"""U-Net as a flat ``nn.Sequential`` with skippable layers, in the form in which torchgpipe benchmarked it.

    image ─ encoder 0 ── stash ─ pool ┐                         ┌ upsample ─ pop ─ decoder 0 ─ 1x1 conv ─ logits
                                encoder 1 ─ stash ─ pool ┐    ┌ upsample ─ pop ─ decoder 1
                                                     ... bottleneck ...

Ronneberger et al. (arXiv 1505.04597) introduced the architecture; here its cells are B blocks of convolution, dropout,
instance norm and leaky ReLU with padding, so that input and output have one size (torchgpipe, arXiv 2004.09910,
section 4). Every operation is a layer of its own: a balance can cut anywhere, and skips are long.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Generator, Iterator
from itertools import pairwise

import torch
from torch import Tensor, nn

from gpipe_bench.skip import Namespace, Skippable, pop, skippable, stash

NamedLayer = tuple[str, nn.Module]


@skippable(stash=["skip"])
class Stash(nn.Module, Skippable):
    """Passes its input on and stashes it as ``skip``."""

    def forward(self, x: Tensor) -> Generator[stash, None, Tensor]:
        """Give ``x`` of shape (N, C, H, W) unchanged."""
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class PopConcat(nn.Module, Skippable):
    """Pops ``skip`` and concatenates it with the input along the channels."""

    def forward(self, x: Tensor) -> Generator[pop, Tensor, Tensor]:
        """Concatenate the popped (N, C', H, W) and ``x`` of shape (N, C, H, W) to (N, C' + C, H, W)."""
        skip = yield pop("skip")
        return torch.cat([skip, x], dim=1)


def unet(
    depth: int = 5,
    blocks: int = 5,
    channels: int = 64,
    *,
    in_channels: int = 3,
    out_channels: int = 1,
    dropout: float = 0.1,
) -> nn.Sequential:
    """A U-Net of (2 depth + 1) cells, flat: 4 blocks (2 depth + 1) + 4 depth + 1 layers.

    Input (N, in_channels, H, W), output (N, out_channels, H, W); H and W are multiples of 2^depth, and at least
    2^(depth+1), since instance norm refuses a single value per channel.

    Args:
        depth: encoder cells, decoder cells and skips.
        blocks: blocks per cell, B in the published (B, C).
        channels: channels of the first encoder, C in (B, C); even, doubled by every encoder.
        in_channels: channels of the image.
        out_channels: channels of the logits.
        dropout: probability that a block drops a channel; published 0.1.
    """
    layers: list[NamedLayer] = []
    namespaces = [Namespace() for _ in range(depth)]
    for i, namespace in enumerate(namespaces):
        width = channels * 2**i
        layers += _cell(f"encoder{i}", [in_channels if i == 0 else width // 2, *[width] * blocks], dropout)
        layers.append((f"encoder{i}_stash", Stash().isolate(namespace)))
        layers.append((f"encoder{i}_pool", nn.MaxPool2d(2)))

    width = channels * 2 ** (depth - 1)
    layers += _cell("bottleneck", [width, *[2 * width] * (blocks - 1), width], dropout)

    for i, namespace in reversed(list(enumerate(namespaces))):
        width = channels * 2**i
        layers.append((f"decoder{i}_upsample", nn.Upsample(scale_factor=2)))
        layers.append((f"decoder{i}_pop", PopConcat().isolate(namespace)))
        layers += _cell(f"decoder{i}", [2 * width, *[width // 2] * blocks], dropout)

    layers.append(("logits", nn.Conv2d(channels // 2, out_channels, kernel_size=1, bias=False)))
    return nn.Sequential(OrderedDict(layers))


def _cell(name: str, widths: list[int], dropout: float) -> Iterator[NamedLayer]:
    """The layers of one cell whose blocks lead from each of ``widths`` to the next."""
    for b, (before, after) in enumerate(pairwise(widths)):
        yield f"{name}_block{b}_conv", nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
        yield f"{name}_block{b}_dropout", nn.Dropout2d(dropout)
        yield f"{name}_block{b}_norm", nn.InstanceNorm2d(after)
        yield f"{name}_block{b}_relu", nn.LeakyReLU(0.01)
