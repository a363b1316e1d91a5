"""A custom function may write to the gradient that it gets: in no mode does anything else read it afterwards."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components, GPipe
from gpipe_bench.skip import pop, skippable, stash
from tests.engine.support import MODES

ROWS, WIDTH = 2, 3


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad.mul_(2 * x)


class Square(nn.Module):
    def forward(self, x):
        return Squared.apply(x)


class Plus(nn.Module):
    """x + w, where both get the same gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(ROWS, WIDTH))

    def forward(self, x):
        return x + self.weight


class PlusTanh(Plus):
    """x + f(w), where the nodes of f are made after those of x."""

    def forward(self, x):
        return x + self.weight.tanh().tanh()


@skippable(stash=["x"])
class Stash(nn.Module):
    def forward(self, x):
        x = Squared.apply(x)
        yield stash("x", x)
        return x


@skippable(pop=["x"])
class PopPlusTanh(PlusTanh):
    def forward(self, x):
        skip = yield pop("x")
        return super().forward(skip) * x


MODELS = {
    "within a partition": ([nn.Linear, Square, Plus, PlusTanh, nn.Linear], [4, 1]),
    "behind a boundary": ([nn.Linear, nn.Linear, nn.Linear, Square, Plus, nn.Linear], [4, 2]),
    "behind a boundary, a function of weights": ([*[nn.Linear] * 3, Square, PlusTanh, nn.Linear], [4, 2]),
    "of a skip": ([nn.Linear, nn.Linear, Stash, nn.Linear, nn.Tanh, PopPlusTanh], [3, 1, 2]),
    "in the loss": ([*[nn.Linear] * 4, Square], [2, 3]),
}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("components", [Components(), Components(fork_join=False), Components(clock_cycle=False)])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_gradients_are_those_of_the_plain_module(model, components, checkpoint, chunks, schedule):
    torch.manual_seed(0)
    kinds, balance = MODELS[model]
    plain = nn.Sequential(*[kind(WIDTH, WIDTH) if kind is nn.Linear else kind() for kind in kinds]).double()
    plain.register_parameter("of_loss", nn.Parameter(torch.rand(1, WIDTH).double()))
    piped, batch = deepcopy(plain), torch.rand(ROWS * chunks, WIDTH).double()

    def backward(model: nn.Module, run: nn.Module, x: Tensor) -> None:
        out = run(x)
        (out + model.of_loss.expand_as(out).tanh()).square().sum().backward()

    for x in batch.split(ROWS):
        backward(plain, nn.Sequential(*plain), x)
    options = {"devices": ["cpu"] * len(balance), "chunks": chunks, "checkpoint": checkpoint, "schedule": schedule}
    pipe = GPipe(nn.Sequential(*piped), balance, components=components, **options)
    # Autograd prefers nodes that were made late in their thread: those of the loss are made early in a fresh one.
    with ThreadPoolExecutor(1) as thread:
        thread.submit(backward, piped, pipe, batch).result()
    for (name, found), wanted in zip(piped.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, msg=name)
