"""What a layer hands on beside its tensors, and what a process has of a module that is on ``meta`` in part."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils import _pytree

from gpipe_bench import GPipe
from gpipe_bench.distributed import PeerError, Pipe
from tests.distributed.virtual import results_of, run_ranks

X = torch.arange(12.0).view(4, 3).double()


class Scaled:
    """A class of a user's: a tensor, and a field that its structure has."""

    def __init__(self, x, field):
        self.x, self.field = x, field


_pytree.register_pytree_node(
    Scaled,
    lambda value: ([value.x], value.field),
    lambda leaves, field: Scaled(*leaves, field),
    serialized_type_name="gpipe_bench_tests.Scaled",
)


class Counted:
    """Equal to all others of its class."""

    def __init__(self):
        self.number = 0

    def __eq__(self, other):
        return isinstance(other, Counted)

    __hash__ = None


FIELDS = {
    "a list": (lambda: [0], lambda field, number: field.__setitem__(0, number), lambda field: field[0]),
    "an object": (Counted, lambda field, number: setattr(field, "number", number), lambda field: field.number),
    "a dict": (lambda: {"a": 0}, lambda field, number: field.update(a=number), lambda field: field["a"]),
    "True and 1": (lambda: None, lambda _, number: number % 2 == 1 or 1, lambda field: 2 if field is True else 3),
}


class Gives(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.name, self.number = nn.Linear(3, 3), name, 0
        self.field = FIELDS[name][0]()

    def forward(self, x):
        self.number += 1
        changed = FIELDS[self.name][1](self.field, self.number)
        return Scaled(self.linear(x), self.field if changed is None else changed)


class Takes(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.linear, self.name = nn.Linear(3, 3), name

    def forward(self, value):
        return self.linear(value.x) * FIELDS[self.name][2](value.field)


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_that_changes_in_place_is_what_it_was_when_it_was_handed_on(name):
    torch.manual_seed(0)
    plain = nn.Sequential(Gives(name), Takes(name)).double()

    def losses(pipe):
        return [float(pipe.step(X, X, functional.mse_loss)) for _ in range(3)]

    def job(group):
        return losses(Pipe(copy.deepcopy(plain), [1, 1], group=group, chunks=1, checkpoint="never"))

    options = {"devices": ["cpu"] * 2, "chunks": 1, "checkpoint": "never", "schedule": "1f1b"}
    expected = losses(GPipe(copy.deepcopy(plain), [1, 1], **options))
    assert results_of(2, job) == [expected, expected]


class Tied(nn.Module):
    """Two linear layers with one weight, and a buffer that has values wherever the weights are."""

    def __init__(self):
        super().__init__()
        with torch.device("meta"):
            self.one, self.other = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.other.weight = self.one.weight
        self.register_buffer("factors", torch.tensor([1.0, 0.5, 0.25]))

    def forward(self, x):
        return self.other(self.one(x)) * self.factors


def test_what_has_values_keeps_them_and_what_is_tied_stays_tied():
    def job(group):
        def ones(module):
            if isinstance(module, nn.Linear):
                nn.init.ones_(module.weight)

        pipe = Pipe(nn.Sequential(Tied(), Tied()), [1, 1], group=group, materialise=ones)
        layer = pipe[0]
        assert layer.one.weight is layer.other.weight
        assert [name for name, _ in pipe.named_parameters()] == [f"{group.rank()}.one.weight"]
        return layer.factors.tolist(), layer.one.weight.tolist()

    assert results_of(2, job) == [([1.0, 0.5, 0.25], [[1.0] * 3] * 3)] * 2


def test_other_layers_in_partitions_are_refused():
    def job(group):
        pipe = Pipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], group=group)
        if group.rank() == 1:
            pipe.partitions[1][0] = nn.Linear(3, 3)
        pipe.step(X.float(), X.float(), functional.mse_loss)

    results = run_ranks(2, job)
    assert isinstance(results[0], PeerError)
    assert "got another layer in pipe.partitions; write pipe[index] = layer" in str(results[1])


class MuteError(Exception):
    def __str__(self):
        raise TypeError("no text")


@pytest.mark.parametrize("where", ["layer", "materialise"])
def test_an_error_without_a_text_is_named(where):
    def fail(*_):
        raise MuteError

    def job(group):
        with torch.device("meta" if where == "materialise" else "cpu"):
            layers = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        if where == "layer":
            layers[1].register_forward_hook(fail)
        materialise = fail if group.rank() == 1 else None
        pipe = Pipe(layers, [1, 1], group=group, materialise=materialise)
        pipe.step(X.float(), X.float(), functional.mse_loss)

    peer, own = run_ranks(2, job)
    assert isinstance(own, MuteError)
    assert isinstance(peer, PeerError)
    assert "MuteError, whose text is a TypeError" in str(peer)
