"""Trains a ResNet of torchvision or timm on handwritten digits with Pipe, cut by balance_by_time.

Afterwards the weights go back into the library's own network, which classifies as well as the pipeline does.

    python examples/resnet_on_digits.py --partitions 2 --chunks 4 --epochs 2
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench import Pipe, WithDevice
from gpipe_bench.balance import balance_by_time
from gpipe_bench.models import MODELS, original, to_original

SIZE = 16


def digits() -> tuple[Tensor, Tensor]:
    """Images of shape (1797, 3, 16, 16), in [0, 1], and their classes."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    return functional.interpolate(images, size=SIZE).expand(-1, 3, -1, -1), torch.tensor(data.target)


def places(partitions: int) -> list[torch.device]:
    """A device for each partition: GPUs in turn, or the CPU."""
    count = torch.cuda.device_count()
    return [torch.device("cuda", j % count) if count else torch.device("cpu") for j in range(partitions)]


def pipeline(network: str, partitions: int, chunks: int) -> Pipe:
    """The network for ten classes, on its devices."""
    layers = MODELS[network].build(size=SIZE, classes=10)
    balance = balance_by_time(partitions, layers, torch.rand(16, 3, SIZE, SIZE), timeout=2.0)
    devices = [device for size, device in zip(balance, places(partitions), strict=True) for _ in range(size)]
    placed = nn.Sequential()
    for (name, layer), device in zip(layers.named_children(), devices, strict=True):
        placed.add_module(name, WithDevice(layer, device))
    # On a CPU all layers are in one place; the balance says where partitions end.
    return Pipe(placed, chunks, checkpoint="except_last", deferred_batch_norm=True, balance=balance)


def batches(images: Tensor, classes: Tensor, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The samples in random order."""
    for picked in torch.randperm(len(images)).split(size):
        yield images[picked], classes[picked]


def train(pipe: Pipe, images: Tensor, classes: Tensor, epochs: int, batch_size: int) -> None:
    """Train, and print the loss of each epoch."""
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    steps = epochs * -(-len(images) // batch_size)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
    pipe.train()
    for epoch in range(epochs):
        losses = []
        for x, y in batches(images, classes, batch_size):
            optimizer.zero_grad()
            logits = pipe(x.to(pipe.devices[0])).local_value()
            loss = functional.cross_entropy(logits, y.to(pipe.devices[-1]))
            loss.backward()
            nn.utils.clip_grad_norm_(pipe.parameters(), 5.0)
            optimizer.step()
            scheduler.step()
            losses.append(loss.item())
        print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}")


def accuracy(model: nn.Module, images: Tensor, classes: Tensor) -> float:
    """Share of images whose class the model finds; a pipeline or a plain network."""
    model.eval()
    with torch.inference_mode():
        output = model(images.to(next(model.parameters()).device))
    logits = output.local_value() if isinstance(model, Pipe) else output
    return (logits.argmax(1).cpu() == classes).float().mean().item()


def main() -> None:
    """Train, test, and put the weights back into torchvision's network."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", default="torchvision/resnet18", help="timm/<name> or torchvision/<name>")
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--chunks", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--images", type=int, default=1500, help="to train on; the rest is for the test")
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # partitions on a CPU share its cores
    images, classes = digits()
    pipe = pipeline(given.network, given.partitions, given.chunks)
    print(f"{len(pipe)} layers in partitions of {pipe.balance} on {[str(device) for device in pipe.devices]}")
    train(pipe, images[: given.images], classes[: given.images], given.epochs, given.batch_size)
    test = images[-297:], classes[-297:]
    print(f"accuracy {accuracy(pipe, *test):.3f}")
    plain = original(given.network, size=SIZE, classes=10)
    plain.load_state_dict(to_original(pipe.state_dict()))
    print(f"accuracy {accuracy(plain, *test):.3f} of the library's own network with these weights")


if __name__ == "__main__":
    main()
