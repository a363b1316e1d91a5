"""Today's decoders in small, and what the plain module gives: the gradients of each micro-batch, in a given order."""

from __future__ import annotations

import copy
from functools import cache

import torch
from torch import Tensor, nn

from gpipe_bench.models.table import MODELS
from gpipe_bench.schedules import Schedule

ROWS, CHUNKS = 8, 4
"""Powers of two, so that dividing a loss rounds nothing."""
_SMALL = {"L": 4, "D": 16, "heads": 4, "kv": 2, "hidden": 24, "vocabulary": 32, "context": 8}
SMALL = {
    "decoder": {**_SMALL, "L": 6},
    "attention-residuals": {**_SMALL, "L": 6, "block": 2},
    "hyper-connections": {**_SMALL, "streams": 3},
    "experts": {**_SMALL, "experts": 4, "chosen": 2, "capacity": 1.0},
    "multi-token": {**_SMALL, "ahead": 2, "tied": False},
    "captions": {**_SMALL, "V": 2, "width": 12, "vheads": 2, "size": 8, "patch": 4},
}


@cache
def made(name: str) -> nn.Sequential:
    """The model; every parameter counts, also those that begin at zero."""
    torch.manual_seed(0)
    module = MODELS[name].build(**SMALL[name])
    for parameter in module.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return module


def batch(name: str) -> tuple[Tensor, Tensor]:
    """A batch, the same for each call."""
    return MODELS[name].make_batch(ROWS, SMALL[name], torch.Generator().manual_seed(1))


@cache
def _gradients(name: str) -> list[dict[str, Tensor]]:
    module = copy.deepcopy(made(name))
    parts = zip(*(whole.chunk(CHUNKS) for whole in batch(name)), strict=True)
    found = []
    for x, target in parts:
        module.zero_grad()
        (MODELS[name].loss(module(x), target) / CHUNKS).backward()
        found.append({key: parameter.grad.clone() for key, parameter in module.named_parameters()})
    return found


def balance(name: str, n: int) -> list[int]:
    """Layers per partition, as even as can be."""
    layers = len(made(name))
    return [layers // n + (j < layers % n) for j in range(n)]


def expected(name: str, cut: list[int], schedule: Schedule | None) -> dict[str, Tensor]:
    """The plain module's gradients, summed over micro-batches in the order in which each partition has them."""
    grads, total = _gradients(name), {}
    places = [j for j, count in enumerate(cut) for _ in range(count)]
    names = [key for key, _ in made(name).named_children()]
    for key in grads[0]:
        order = [*reversed(range(CHUNKS))]
        if schedule is not None:
            j = places[names.index(key.partition(".")[0])]
            order = [a.i for actions in schedule.devices for a in actions if a.j == j and a.kind in {"B", "W"}]
        first, *others = (grads[i][key] for i in order)
        total[key] = sum(others, first)
    return total
