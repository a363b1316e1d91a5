"""Trains a small U-Net to clean noisy digits: a program for torchgpipe with two imports changed.

It has three partitions, long skips in namespaces, and deferred batch normalization.

    python examples/migrated/unet.py --steps 60
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench import GPipe
from gpipe_bench.skip import Namespace, pop, skippable, stash


@skippable(stash=["skip"])
class Down(nn.Module):
    """(N, C, H, W) -> (N, 2C, H/2, W/2); stashes its input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(2 * channels)

    def forward(self, x: Tensor) -> Any:
        yield stash("skip", x)
        return functional.relu(self.norm(self.conv(x)))


@skippable(pop=["skip"])
class Up(nn.Module):
    """(N, 2C, H, W) -> (N, C, 2H, 2W); takes the input of the Down that belongs to it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3 * channels, channels, 3, padding=1)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        x = torch.cat([functional.interpolate(x, scale_factor=2), skip], dim=1)
        return functional.relu(self.norm(self.conv(x)))


def network(depth: int = 2, channels: int = 8) -> nn.Sequential:
    """Encoders, decoders, and a skip from each to its counterpart."""
    namespaces = [Namespace() for _ in range(depth)]
    downs = [Down(channels * 2**level).isolate(ns) for level, ns in enumerate(namespaces)]
    ups = [Up(channels * 2**level).isolate(ns) for level, ns in enumerate(namespaces)]
    return nn.Sequential(nn.Conv2d(1, channels, 3, padding=1), *downs, *reversed(ups), nn.Conv2d(channels, 1, 1))


def batches(steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy digits of shape (size, 1, 8, 8), and which of their pixels are ink."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    for _ in range(steps):
        picked = clean[torch.randint(len(clean), (size,), generator=generator)]
        yield picked + 0.4 * torch.randn(picked.shape, generator=generator), (picked > 0.5).float()


def main() -> None:
    """Train, and print the loss every ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # partitions on a CPU share its cores
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", j % count) if count else torch.device("cpu") for j in range(3)]
    model = GPipe(network(), balance=[2, 2, 2], devices=devices, chunks=4, deferred_batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
    for step, (x, ink) in enumerate(batches(given.steps, given.batch_size)):
        optimizer.zero_grad()
        logits = model(x.to(model.devices[0]))
        loss = functional.binary_cross_entropy_with_logits(logits, ink.to(model.devices[-1]))
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step}: loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
