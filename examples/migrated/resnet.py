"""Trains a residual network on handwritten digits: a program for fairscale's Pipe with two imports changed.

Its shortcuts are skips, which cross from one partition to the other.

    python examples/migrated/resnet.py --steps 60
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench import GPipe as Pipe
from gpipe_bench.skip import Namespace, pop, skippable, stash


@skippable(stash=["shortcut"])
class Enter(nn.Module):
    """Passes its input on, and to the Leave that belongs to it."""

    def forward(self, x: Tensor) -> Any:
        yield stash("shortcut", x)
        return x


@skippable(pop=["shortcut"])
class Leave(nn.Module):
    """Adds what Enter was given."""

    def forward(self, x: Tensor) -> Any:
        shortcut = yield pop("shortcut")
        return functional.relu(x + shortcut)


def network(blocks: int = 3, channels: int = 16) -> nn.Sequential:
    """Residual blocks whose layers may be in different partitions."""
    layers: list[nn.Module] = [nn.Conv2d(1, channels, 3, padding=1), nn.ReLU()]
    for _ in range(blocks):
        namespace = Namespace()
        inside = [nn.Conv2d(channels, channels, 3, padding=1), nn.GroupNorm(4, channels)]
        layers += [Enter().isolate(namespace), *inside, Leave().isolate(namespace)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels, 10))


def batches(steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images of shape (size, 1, 8, 8) and their classes."""
    generator = torch.Generator().manual_seed(1)
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    classes = torch.tensor(data.target)
    for _ in range(steps):
        picked = torch.randint(len(images), (size,), generator=generator)
        yield images[picked], classes[picked]


def main() -> None:
    """Train, and print the loss every ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # partitions on a CPU share its cores
    count = torch.cuda.device_count()
    devices = [torch.device("cuda", j % count) if count else torch.device("cpu") for j in range(2)]
    model = Pipe(network(), balance=[9, 8], devices=devices, chunks=4, checkpoint="always")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for step, (x, classes) in enumerate(batches(given.steps, given.batch_size)):
        optimizer.zero_grad()
        logits = model(x.to(model.devices[0]))
        loss = functional.cross_entropy(logits, classes.to(model.devices[-1]))
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step}: loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
