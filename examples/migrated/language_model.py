"""Trains a transformer on the text of Python's help pages: a program for PyTorch's Pipe with two imports changed.

It has an input that is not split (NoChunk) and a skip from the embedding to the last layer; two GPUs get a half each.

    python examples/migrated/language_model.py --steps 60
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pydoc_data import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gpipe_bench import NoChunk, Pipe
from gpipe_bench.skip import pop, skippable, stash

LENGTH, WIDTH, HEADS = 32, 64, 4


class Embed(nn.Module):
    """(tokens of shape (N, T), places of shape (T,)) -> embeddings of shape (N, T, D)."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(tokens, WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        return self.tokens(tokens) + self.places(places)


@skippable(stash=["embedding"])
class Keep(nn.Module):
    """Passes the embeddings on, and to the head."""

    def forward(self, x: Tensor) -> Any:
        yield stash("embedding", x)
        return x


class Block(nn.Module):
    """(N, T, D) -> (N, T, D), by attention to what came before, and an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, src_mask=self.mask)


@skippable(pop=["embedding"])
class Head(nn.Module):
    """(N, T, D) -> logits of shape (N, T, tokens)."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, tokens)

    def forward(self, x: Tensor) -> Any:
        embedding = yield pop("embedding")
        return self.linear(x + embedding)


def text() -> tuple[Tensor, int]:
    """The help pages as numbers of their characters, and how many characters there are."""
    pages = "".join(topics.topics[name] for name in sorted(topics.topics))
    known = sorted(set(pages))
    number = {character: place for place, character in enumerate(known)}
    return torch.tensor([number[character] for character in pages]), len(known)


def batches(data: Tensor, steps: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the text, and the characters that follow."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH - 1, (size,), generator=generator)
        pieces = torch.stack([data[start : start + LENGTH + 1] for start in starts])
        yield pieces[:, :-1], pieces[:, 1:]


def main() -> None:
    """Train, and print the loss every ten steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=16)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # partitions on a CPU share its cores
    data, tokens = text()
    count = torch.cuda.device_count()
    first, second = (torch.device("cuda", j % count) if count else torch.device("cpu") for j in range(2))
    stages = [Embed(tokens), Keep(), Block(), Block()], [Block(), Head(tokens)]
    model = nn.Sequential(nn.Sequential(*stages[0]).to(first), nn.Sequential(*stages[1]).to(second))
    model = Pipe(model, chunks=4, checkpoint="except_last")
    places = torch.arange(LENGTH, device=first)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 20, gamma=0.9)
    model.train()
    for step, (x, y) in enumerate(batches(data, given.steps, given.batch_size)):
        optimizer.zero_grad()
        logits = model(x.to(first), NoChunk(places)).local_value()
        loss = functional.cross_entropy(logits.flatten(0, 1), y.to(second).flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        if step % 10 == 0 or step == given.steps - 1:
            print(f"step {step}: loss {loss.item():.5f}")


if __name__ == "__main__":
    main()
