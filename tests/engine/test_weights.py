"""PyTorch's cache of parametrized weights, one for all threads, in the layers of a pipeline."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from gpipe_bench import GPipe
from tests.engine.support import Do

CHECKPOINTS = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
SCHEDULES = pytest.mark.parametrize("schedule", [None, "gpipe"])
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def symmetric(weight):
    return weight.triu() + weight.triu(1).mT


class Recurrent(nn.Module):
    """Takes its weight several times, as PyTorch shows it for recurrent layers."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        parametrize.register_parametrization(self.linear, "weight", Do(symmetric))

    def forward(self, x):
        with parametrize.cached():
            return self.linear(self.linear(x).tanh())


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Recurrent(), Recurrent())


def pipeline(balance, chunks, checkpoint, schedule):
    devices = ["cpu"] * len(balance)
    return GPipe(layers(), balance, devices=devices, chunks=chunks, checkpoint=checkpoint, schedule=schedule)


@pytest.mark.parametrize(("balance", "chunks"), [([1, 1], 1), ([2], 3)])
@CHECKPOINTS
@SCHEDULES
def test_a_layer_may_use_it_where_nothing_runs_beside(schedule, checkpoint, balance, chunks):
    plain, pipe = layers(), pipeline(balance, chunks, checkpoint, schedule)
    for model in (plain, pipe):
        model(X).square().sum().backward()
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@CHECKPOINTS
@SCHEDULES
def test_elsewhere_it_is_refused_in_every_batch(schedule, checkpoint):
    pipe = pipeline([1, 1], 3, checkpoint, schedule)
    for _ in range(3):
        with pytest.raises(RuntimeError, match=r"got parametrize.cached\(\) within a layer, .* take the weight once"):
            pipe(X)


def test_layers_of_which_one_uses_it_while_the_caller_does():
    pipe = pipeline([1, 1], 3, "never", None)
    with parametrize.cached():
        found = pipe(X)
    torch.testing.assert_close(found, copy.deepcopy(nn.Sequential(*pipe))(X))


@CHECKPOINTS
@SCHEDULES
def test_the_caller_may_use_it_in_one_graph_alone(schedule, checkpoint):
    """One weight, made without a graph, would serve all tasks of a checkpoint or a schedule."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in plain:
        parametrize.register_parametrization(layer, "weight", Do(symmetric))
    options = {"devices": ["cpu"] * 2, "chunks": 3, "checkpoint": checkpoint, "schedule": schedule}
    pipe = GPipe(copy.deepcopy(plain), [1, 1], **options)
    with parametrize.cached():
        if (checkpoint, schedule) == ("never", None):
            torch.testing.assert_close(pipe(X), plain(X))
        else:
            with pytest.raises(RuntimeError, match=r"got parametrize.cached\(\) around a batch with checkpoints"):
                pipe(X)
