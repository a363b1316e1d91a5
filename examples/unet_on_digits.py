"""Trains a U-Net to clean noisy digits with GPipe, cut by balance_by_size; its long skips are portals.

The plain model trains beside it from the same weights on the same batches, and both print the same losses.

    python examples/unet_on_digits.py --partitions 3 --chunks 4 --steps 60
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench import GPipe
from gpipe_bench.balance import balance_by_size
from gpipe_bench.models import MODELS


def batches(steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Noisy digits of shape (size, 1, 16, 16), and which of their pixels are ink."""
    generator = torch.Generator().manual_seed(1)
    clean = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    clean = functional.interpolate(clean, size=16)
    for _ in range(steps):
        picked = clean[torch.randint(len(clean), (size,), generator=generator)]
        yield picked + 0.6 * torch.randn(picked.shape, generator=generator), (picked > 0.5).float()


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, ink: Tensor) -> tuple[float, float]:
    """One training step: the loss, and the share of ink that was found and is ink (intersection over union)."""
    optimizer.zero_grad()
    logits = model(x)
    loss = functional.binary_cross_entropy_with_logits(logits, ink.to(logits.device))
    loss.backward()
    optimizer.step()
    found, ink = (logits > 0).cpu(), ink > 0
    return loss.item(), (found & ink).sum().item() / (found | ink).sum().item()


def main() -> None:
    """Train both models side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=32)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # partitions on a CPU share its cores
    # Without dropout: masks are drawn per micro-batch, so they would be others than those of the plain model.
    plain = MODELS["unet"].build(**{"depth": 2, "B": 1, "C": 8, "in": 1, "dropout": 0.0})
    layers = copy.deepcopy(plain)
    balance = balance_by_size(given.partitions, layers, torch.empty(given.batch_size, 1, 16, 16), chunks=given.chunks)
    count = torch.cuda.device_count()
    devices = [f"cuda:{j % count}" if count else "cpu" for j in range(given.partitions)]
    pipe = GPipe(layers, balance, devices=devices, chunks=given.chunks, checkpoint="always")
    print(f"{len(pipe)} layers in partitions of {pipe.balance} on {[str(device) for device in pipe.devices]}")
    optimizers = {model: torch.optim.Adam(model.parameters(), lr=3e-3) for model in (plain, pipe)}
    for number, (x, ink) in enumerate(batches(given.steps, given.batch_size)):
        expected, _ = step(plain, optimizers[plain], x, ink)
        loss, overlap = step(pipe, optimizers[pipe], x.to(pipe.devices[0]), ink)
        if number % 10 == 0 or number == given.steps - 1:
            print(f"step {number}: loss {loss:.4f}, of the plain model {expected:.4f}; overlap {overlap:.3f}")


if __name__ == "__main__":
    main()
