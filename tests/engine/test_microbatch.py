"""Splitting batches and putting results together."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from functools import partial, wraps
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from gpipe_bench import GPipe
from gpipe_bench.engine.gpipe import gather, scatter
from gpipe_bench.skip import pop, skippable, stash
from tests.engine.support import Do, Flags, on_cpu


@pytest.mark.parametrize(
    ("size", "chunks", "sizes"),
    [
        (8, 4, [2, 2, 2, 2]),
        (7, 3, [3, 3, 1]),
        (5, 4, [2, 2, 1]),
        (3, 8, [1, 1, 1]),
        (1, 1, [1]),
        (6, 4, [2, 2, 2]),
        (272, 32, [9] * 30 + [2]),
    ],
)
def test_sizes_are_those_of_chunk(size, chunks, sizes):
    assert [microbatch.values[0].size(0) for microbatch in scatter(torch.zeros(size, 2), chunks)[0]] == sizes


def test_a_tuple_is_split_side_by_side():
    a, b = torch.arange(5), torch.arange(10.0).view(5, 2)
    pieces, _ = scatter((a, b), 3)
    assert [piece.values[0].tolist() for piece in pieces] == [[0, 1], [2, 3], [4]]
    assert [piece.values[1].size(0) for piece in pieces] == [2, 2, 1]
    assert all(piece.structure is not None for piece in pieces)


@pytest.mark.parametrize("value", [torch.arange(7), (torch.arange(7), torch.zeros(7, 2)), (torch.arange(7),)])
@pytest.mark.parametrize("chunks", [1, 3, 9])
def test_gather_undoes_scatter(value, chunks):
    found = gather(scatter(value, chunks)[0]).unwrap()
    assert type(found) is type(value)
    torch.testing.assert_close(found, value)


@pytest.mark.parametrize("value", [torch.ones(4, 3), (torch.ones(4, 3),)])
def test_a_tuple_of_one_tensor_stays_a_tuple(value):
    pipe = on_cpu(nn.Sequential(Flags(), Flags()), [1, 1], chunks=2)
    assert type(pipe(value)) is type(value)


def test_pieces_share_the_memory_of_the_batch():
    batch = torch.zeros(4, 2)
    scatter(batch, 2)[0][1].values[0].fill_(1)
    assert batch.sum() == 4


@pytest.mark.parametrize("schedule", ["gpipe", None])
def test_an_output_without_a_batch_dimension(schedule):
    def mean_and_rows(x):
        return x.mean(), x

    layers = nn.Sequential(nn.Linear(3, 3), Do(mean_and_rows))
    pipe = on_cpu(layers, [1, 1], chunks=3, schedule=schedule)
    message = (
        "output of the last layer must have a batch dimension, got a tensor without dimensions for each of 3 "
        "micro-batches; return a row per sample, and reduce them in the loss"
    )
    x = torch.ones(6, 3)
    with pytest.raises(ValueError, match=message):
        pipe(x)
    with pytest.raises(ValueError, match=message):
        pipe.step(x, x, lambda output, target: (output[1] - target).square().mean(), return_output=True)
    assert pipe(x[:1])[0].shape == ()


@dataclass
class Hidden:
    tensor: Any


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


HIDING = {
    "attribute": Hidden,
    "list in an attribute": lambda y: Hidden([y]),
    "slot": Slotted,
    "set": lambda y: {y},
    "far inside": lambda y: Hidden([[[[[Hidden([y])]]]]]),
    "mapping": lambda y: MappingProxyType({"y": y}),
    "partial": lambda y: partial(torch.add, y),
    "keyword of a partial": lambda y: partial(torch.add, other=y),
    "closure": lambda y: lambda x: x + y,
    "closure of a closure": lambda y: wraps(torch.add)(lambda x: [x + y for _ in x]),
    "default": lambda y: lambda x, y=y: x + y,
    "keyword default": lambda y: lambda x, *, y=y: x + y,
    "method": lambda y: Hidden(y).__eq__,
    "method of a tensor": lambda y: y.add,
    "callable object": lambda y: Hidden(partial(Hidden(y).__eq__)),
    "keys": lambda y: {y: 1}.keys(),
    "values": lambda y: {"y": y}.values(),
    "items": lambda y: {"y": y}.items(),
    "deque in an object": lambda y: Hidden(deque([y])),
    "iterator": lambda y: iter([y]),
    "map": lambda y: map(torch.neg, [y]),
    "zip": lambda y: zip([y], [1], strict=True),
    "generator": lambda y: (each for each in [y]),
    "namespace": lambda y: SimpleNamespace(y=y),
    "set in a dict in a tuple": lambda y: Hidden((1, {"y": frozenset([y])})),
}


@pytest.mark.parametrize("name", HIDING)
def test_an_object_that_hides_tensors_is_refused(name):
    pipe = on_cpu(nn.Sequential(nn.Linear(4, 4), Do(HIDING[name]), Do(lambda _: torch.ones(2, 1))), [2, 1], chunks=3)
    with pytest.raises(TypeError, match=r"layers must hand on tensors in tuples, lists or dicts, got a \w+ that holds"):
        pipe(torch.ones(6, 4))


@skippable(stash=["hidden"])
class StashesHidden(nn.Module):
    def forward(self, x):
        yield stash("hidden", partial(torch.add, x))
        return x


@skippable(pop=["hidden"])
class PopsHidden(nn.Module):
    def forward(self, x):
        hidden = yield pop("hidden")
        return hidden(x)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_a_skip_that_hides_tensors_is_refused(schedule):
    layers = nn.Sequential(nn.Linear(4, 4), StashesHidden(), nn.Linear(4, 4), PopsHidden())
    pipe = GPipe(layers, [2, 1, 1], devices=["cpu"] * 3, chunks=3, schedule=schedule)
    with pytest.raises(TypeError, match=r"layers must hand on tensors in .*, got a partial that holds"):
        pipe(torch.ones(6, 4))


WEIGHT = torch.ones(4)


def scaled(x, by=2.0):
    return x * by + WEIGHT


def times(number):
    return lambda x: x * number


@pytest.mark.parametrize(
    "value",
    [torch.add, scaled, times(3), partial(scaled, by=3), len, "text", Flags().forward, {1: 2}.keys(), Hidden(range(9))],
    ids=str,
)
@pytest.mark.parametrize("schedule", ["gpipe", None])
def test_what_holds_no_tensor_or_only_those_of_modules_and_globals_goes_on_as_it_is(value, schedule):
    seen = []
    layers = nn.Sequential(Do(lambda x: (x, value)), Do(lambda pair: seen.append(pair[1]) or pair[0]))
    on_cpu(layers, [1, 1], chunks=2, schedule=schedule)(torch.ones(4, 4))
    assert all(each is value for each in seen)
