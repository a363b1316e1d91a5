"""What a layer hands on is its value then, though the layer writes to the same memory for the next micro-batch."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench import is_recomputing
from gpipe_bench.skip import Namespace, pop, skippable, stash
from tests.engine.steps import WAYS, scheduled
from tests.engine.support import MODES

CHUNKS, WIDTH = 4, 3


class Counting(nn.Module):
    """Hands on a table that it updates in place: a buffer, a frozen parameter, or an attribute."""

    def __init__(self, kind):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        if kind == "buffer":
            self.register_buffer("table", torch.ones(WIDTH))
        elif kind == "code book":
            self.table = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        elif kind == "attribute":
            self.table = torch.ones(WIDTH, dtype=torch.float64)
        self.kind = kind

    def counted(self, x):
        if self.kind == "made at first":
            self.table = torch.ones_like(x[0], requires_grad=False) if not hasattr(self, "table") else self.table
        if not is_recomputing():
            self.table.mul_(1.5)
        return self.table[:2] if self.kind == "buffer" else self.table

    def forward(self, x):
        return self.linear(x), self.counted(x)


class Using(nn.Module):
    """Adds the table, of which autograd saves nothing."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        x, table = value
        return torch.tanh(self.linear(x)) + table.mean()


@skippable(stash=["table"])
class Stashing(Counting):
    def forward(self, x):
        yield stash("table", self.counted(x))
        return self.linear(x)


@skippable(pop=["table"])
class Multiplying(nn.Module):
    """Multiplies by the table, which autograd saves."""

    def forward(self, x):
        table = yield pop("table")
        return x * table.mean()


class Prepared(nn.Module):
    """Writes its outputs of evaluation to memory that it has, in the way that ``kind`` says."""

    def __init__(self, kind):
        super().__init__()
        self.weight, self.kind = nn.Parameter(torch.rand(WIDTH, WIDTH)), kind
        self.register_buffer("out", torch.zeros(2, WIDTH), persistent=False)

    def forward(self, x):
        if torch.is_grad_enabled():
            return x @ self.weight
        if self.kind == "out=":
            return torch.mm(x, self.weight, out=self.out)
        return self.out.copy_(x @ self.weight).view(1, 2, WIDTH)[0]


KINDS = ("buffer", "code book", "attribute", "made at first", "skip")


def counting(kind):
    torch.manual_seed(0)
    if kind == "skip":
        one, two = Namespace(), Namespace()
        layers = [Stashing("buffer").isolate(one), Stashing("code book").isolate(two), Multiplying().isolate(one)]
        layers += [Multiplying().isolate(two)]
    else:
        layers = [Counting(kind), Using(), Counting(kind), Using()]
    return nn.Sequential(*layers).double()


def prepared(kind):
    torch.manual_seed(0)
    return nn.Sequential(*(Prepared(kind) for _ in range(4))).double()


def numbers():
    x = torch.linspace(-1, 1, 2 * CHUNKS * WIDTH, dtype=torch.float64).view(2 * CHUNKS, WIDTH)
    return x, x.flip(0)


def in_a_loop(model):
    """Loss and gradients of a step, micro-batch by micro-batch."""
    x, y = numbers()
    losses = []
    for part, target in zip(x.chunk(CHUNKS), y.chunk(CHUNKS), strict=True):
        losses.append(functional.mse_loss(model(part), target) / CHUNKS)
        losses[-1].backward()
    return sum(loss.detach() for loss in losses), {name: each.grad for name, each in model.named_parameters()}


@torch.no_grad()
def evaluated_in_a_loop(model):
    return torch.cat([model(part).clone() for part in numbers()[0].chunk(CHUNKS)])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(("schedule", "called"), WAYS)
def test_memory_that_is_updated_in_place(schedule, called, checkpoint, kind):
    x, y = numbers()
    for workers in ("always", "never"):
        pipe = scheduled(counting(kind), [1] * 4, schedule, chunks=CHUNKS, checkpoint=checkpoint, workers=workers)
        loss = functional.mse_loss(pipe(x), y) if called else pipe.step(x, y, functional.mse_loss)
        if called:
            loss.backward()
        value, grads = in_a_loop(counting(kind))
        torch.testing.assert_close(loss.detach(), value)
        for name, parameter in pipe.named_parameters():
            torch.testing.assert_close(parameter.grad, grads[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind", ["out=", "copy_"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(("schedule", "called"), WAYS)
def test_outputs_of_an_evaluation_in_prepared_memory(schedule, called, mode, kind):
    model = prepared(kind)
    for workers in ("always", "never"):
        pipe = scheduled(copy.deepcopy(model), [1] * 4, schedule, chunks=CHUNKS, workers=workers)
        for _ in range(2):
            with mode():
                assert torch.equal(pipe(numbers()[0]), evaluated_in_a_loop(model))
