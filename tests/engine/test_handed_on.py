"""A value without a gradient that a checkpointed partition only hands on needs none behind it, either."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.pipe import NoChunk, Pipe
from gpipe_bench.skip import pop, skippable, stash
from tests.engine.steps import mean_loss, samples, scheduled, step, targets
from tests.engine.support import MODES, assert_same

every_schedule = pytest.mark.parametrize("schedule", [None, "gpipe", "1f1b", "zb_h1"])
every_mode = pytest.mark.parametrize("checkpoint", MODES)


class Beside(nn.Module):
    """(x, value) -> (a layer's result, value), in a form that knows what the layer behind it does."""

    def __init__(self, use):
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, values):
        x, value = values
        return self.linear(x * self.use(value)), nn.Identity()(value)


class First(nn.Module):
    def forward(self, values):
        return values[0]


def to_numpy(value):
    return torch.from_numpy(value.numpy() * 2)


def written_to(value):
    return torch.mul(value, 2, out=value.clone())


def seen(value):
    assert not value.requires_grad
    return value


@every_schedule
@every_mode
@pytest.mark.parametrize("use", [to_numpy, written_to, seen])
def test_values_beside_what_is_computed(use, checkpoint, schedule):
    plain = nn.Sequential(Beside(use), Beside(use), Beside(use), First()).double()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint)
    x = (samples(7, 4), samples(7, 4, requires_grad=False))
    for _ in range(2):
        assert_same(step(pipe, x, targets(7)), step(plain, x, targets(7)))


class Neighbours(nn.Module):
    """A layer of a graph network: (x, adjacency) -> (x of the neighbours, adjacency)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, adjacency):
        return torch.stack([torch.sparse.mm(adjacency, each) for each in self.linear(x)]), adjacency


class Values(nn.Module):
    def forward(self, x, adjacency):
        return x


@every_schedule
@every_mode
def test_a_sparse_matrix_for_all_microbatches(checkpoint, schedule):
    layers = nn.Sequential(Neighbours(), Neighbours(), Neighbours(), Values()).double()
    plain, adjacency = copy.deepcopy(layers), torch.eye(5).double().to_sparse()
    pipe = Pipe(layers, chunks=3, balance=[1] * 4, checkpoint=checkpoint, schedule=schedule)
    x = samples(7, 5, 4)
    found = pipe.step((x, NoChunk(adjacency)), targets(7), mean_loss)
    values = x
    for layer in plain:
        values = layer(values if values is x else values[0], adjacency)
    expected = mean_loss(values, targets(7))
    expected.backward()
    torch.testing.assert_close(found, expected.detach())
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


@skippable(stash=["mask"])
class StashMask(nn.Module):
    def forward(self, values):
        yield stash("mask", values[1])
        return values[0]


@skippable(pop=["mask"])
class PopMask(nn.Module):
    def forward(self, x):
        mask = yield pop("mask")
        return x * seen(mask)


@every_schedule
@every_mode
@pytest.mark.parametrize("portals", [True, False])
def test_a_skip(portals, checkpoint, schedule):
    plain = nn.Sequential(StashMask(), nn.Linear(4, 4), nn.Linear(4, 4), PopMask()).double()
    components = Components(portals=portals)
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint, components=components)
    x = (samples(7, 4), samples(7, 4, requires_grad=False))
    for _ in range(2):
        assert_same(step(pipe, x, targets(7)), step(plain, x, targets(7)))


class InPlace(nn.Module):
    """Writes its weight into the second value, which needs a gradient from then on."""

    def __init__(self, function=None):
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))
        self.function = function or (lambda value, weight: value.mul_(weight))

    def forward(self, values):
        return values[0], self.function(values[1], self.weight)


class Through(torch.autograd.Function):
    """Hands on the value, and gives its gradient to the weight."""

    @staticmethod
    def forward(ctx, value, weight):
        return value

    @staticmethod
    def backward(ctx, grad):
        return None, grad.sum(0)


class Product(nn.Module):
    def forward(self, values):
        return values[0] * values[1]


@every_schedule
@every_mode
@pytest.mark.parametrize("function", [None, Through.apply], ids=["written", "function"])
def test_a_value_that_a_weight_changes_is_not_only_handed_on(function, checkpoint, schedule):
    plain = nn.Sequential(Beside(torch.sin), InPlace(function), Product(), nn.Linear(4, 4)).double()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint)
    for _ in range(2):
        found = pipe.step(batch(), targets(7), mean_loss)
        expected = mean_loss(plain(batch()), targets(7))
        expected.backward()
        torch.testing.assert_close(found, expected.detach())
        torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])
    assert plain[1].weight.grad.abs().max() > 0


def batch():
    return samples(7, 4), samples(7, 4).detach()
