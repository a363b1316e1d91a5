"""What goes from layer to layer: tensors in whatever structure PyTorch knows, and things that are no tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components, GPipe

pytestmark = pytest.mark.usefixtures("either_backward")


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Hidden:
    tensor: Tensor


FORMS = {
    "list": (lambda y: [y, y * 2], lambda v: v[0] + v[1]),
    "dict": (lambda y: {"a": y, "b": (y * 2, None)}, lambda v: v["a"] + v["b"][0]),
    "nested": (lambda y: ((y, y * 2), True), lambda v: v[0][0] + v[0][1] if v[1] else None),
    "named": (lambda y: Pair(y, y * 2), lambda v: v.first + v.second),
    "with-a-string": (lambda y: (y, "sum", y * 2), lambda v: v[0] + v[2] if v[1] == "sum" else None),
}


class Give(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return FORMS[self.form][0](self.linear(x))


class Take(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def forward(self, values):
        return FORMS[self.form][1](values)


def gradients(model: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, 24).view(6, 4)
    model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def pipeline(module: nn.Sequential, balance: list[int], **settings) -> GPipe:
    return GPipe(copy.deepcopy(module), balance, devices=["cpu"] * len(balance), chunks=3, **settings)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize("form", FORMS)
def test_structures_cross_partitions_with_their_gradients(form, checkpoint, transfer):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), Give(form), Take(form), nn.Linear(4, 4))
    pipe = pipeline(plain, [2, 1, 1], checkpoint=checkpoint, transfer=transfer)
    torch.testing.assert_close(gradients(pipe), gradients(plain))


class Slotted:
    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


HIDING = {
    "attribute": (Hidden, lambda hidden: hidden.tensor),
    "list in an attribute": (lambda y: Hidden([y]), lambda hidden: hidden.tensor[0]),
    "slot": (Slotted, lambda hidden: hidden.tensor),
    "set": (lambda y: {y}, lambda hidden: next(iter(hidden))),
    "far inside": (lambda y: Hidden([[[[[Hidden([y])]]]]]), lambda hidden: hidden.tensor[0][0][0][0][0].tensor[0]),
    "mapping": (lambda y: MappingProxyType({"y": y}), lambda hidden: hidden["y"]),
}


@pytest.mark.parametrize("name", HIDING)
def test_an_object_that_hides_tensors_is_refused(name):
    hide, find = HIDING[name]

    class Wrap(nn.Module):
        def forward(self, x):
            return hide(x)

    class Unwrap(nn.Module):
        def forward(self, hidden):
            return find(hidden)

    pipe = pipeline(nn.Sequential(nn.Linear(4, 4), Wrap(), Unwrap()), [2, 1])
    with pytest.raises(TypeError, match=r"layers must hand on tensors in tuples, lists or dicts, got a \w+ that holds"):
        gradients(pipe)


@pytest.mark.parametrize("clock_cycle", [True, False])
@pytest.mark.parametrize("balance", [[2], [1, 1]])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_a_first_layer_that_writes_to_its_input(checkpoint, balance, clock_cycle):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
    pipe = pipeline(plain, balance, checkpoint=checkpoint, components=Components(clock_cycle=clock_cycle))
    torch.testing.assert_close(gradients(pipe), gradients(plain))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"components": "dep-x-x"}, r"components must be .*, got 'dep-x-x'; write Components"),
        ({"balance": 1}, r"balance must be a list .*, got 1; put it into a list"),
        ({"devices": "cpu"}, r"devices must be a list .*, got 'cpu'; put it into a list"),
        ({"devices": torch.device("cpu")}, r"devices must be a list .*, got device\(type='cpu'\); put it into a list"),
    ],
)
def test_a_thing_of_the_wrong_kind_is_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        GPipe(nn.Sequential(nn.Linear(1, 1)), **{"balance": [1], "devices": ["cpu"], **arguments})


def test_a_balance_may_be_a_generator():
    assert GPipe(nn.Sequential(nn.Linear(1, 1)), (size for size in [1]), devices=["cpu"]).balance == [1]
