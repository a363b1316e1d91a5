"""Values beside the hidden states: one without a gradient that a checkpointed partition only hands on needs none behind
it, either; one that the partition makes counts as needing one, which changes no result.
"""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from torch import nn

from gpipe_bench import Components, NoChunk, Pipe
from gpipe_bench.errors import UnsupportedError
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


def weighed(x, matrix):
    return torch.sparse.mm(matrix, x.t()).t()


def scaled(x, value):
    return x * value


def from_sparse(x, value):
    return x * value.to_dense()


def from_jagged(x, value):
    return x * value.to_padded_tensor(0.0)


MADE = {
    "mask": (lambda x, given, weight: (x > 0).double(), scaled),
    "detached": (lambda x, given, weight: x.detach()[:, :1], scaled),
    "complex": (lambda x, given, weight: torch.polar(x.detach().abs(), x.detach()), lambda x, value: (x * value).abs()),
    "coo": (lambda x, given, weight: torch.eye(4).double().to_sparse(), weighed),
    "csr": (lambda x, given, weight: torch.eye(4).double().to_sparse_csr(), weighed),
    "coo with a gradient": (lambda x, given, weight: (x * weight).to_sparse(), from_sparse),
    "csr with a gradient": (lambda x, given, weight: torch.diag(weight).to_sparse_csr(), weighed),
    "jagged": (lambda x, given, weight: torch.nested.nested_tensor([*x.detach()], layout=torch.jagged), from_jagged),
    "view of an input": (lambda x, given, weight: given.view(-1, 4), scaled),
    "clone of an input": (lambda x, given, weight: given.clone(), scaled),
}


class Makes(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.linear, self.make = nn.Linear(4, 4), make
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 4))

    def forward(self, values):
        x, given = values
        return self.linear(x), self.make(x, given, self.weight)


class Uses(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, values):
        x, value = values
        return self.linear(self.use(x, value)), value


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@every_schedule
@every_mode
@pytest.mark.parametrize("made", MADE)
def test_values_that_a_layer_makes(made, checkpoint, schedule):
    make, use = MADE[made]
    plain = nn.Sequential(Makes(make), Uses(use), Uses(use), First()).double()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint)
    x = (samples(7, 4), samples(7, 4, requires_grad=False))
    assert_same(step(pipe, x, targets(7)), step(plain, x, targets(7)))


@every_schedule
def test_jagged_values_that_need_a_gradient_without_checkpoints(schedule):
    make = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
    plain = nn.Sequential(Makes(lambda x, given, weight: make([*(x * weight)])), Uses(from_jagged), First()).double()
    pipe = scheduled(copy.deepcopy(plain), [1] * 3, schedule, chunks=3, checkpoint="never")
    x = (samples(7, 4), samples(7, 4, requires_grad=False))
    assert_same(step(pipe, x, targets(7)), step(plain, x, targets(7)))


@every_schedule
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
def test_a_nested_tensor_must_be_jagged(schedule):
    plain = nn.Sequential(Makes(lambda x, given, weight: torch.nested.nested_tensor([*x])), Uses(from_jagged), First())
    pipe = scheduled(plain.double(), [1] * 3, schedule, checkpoint="always")
    with pytest.raises(UnsupportedError, match=r"must be jagged, got .* make it with layout=torch\.jagged"):
        step(pipe, (samples(7, 4), samples(7, 4)), targets(7))
