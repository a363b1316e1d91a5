"""Models that are hard to cut into partitions, each a case of the test that pipelines train like the plain module."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tests.engine.steps import mean_loss, samples
from tests.engine.support import MODES, Do, Embed, Mix, Narrow, Tag, Widen, skip_pair


@dataclass(frozen=True)
class Case:
    """A model of four partitions.

    Attributes:
        layers: makes one layer for each partition.
        batch: makes 7 rows, from whether they may require a gradient.
        loss: of output and target.
        modes: the checkpoint modes that can run it.
    """

    layers: Callable[[], list[nn.Module]]
    batch: Callable[[bool], Any] = lambda needs: samples(7, 3, requires_grad=needs)
    loss: Callable[[Any, Tensor], Tensor] = mean_loss
    modes: tuple[str, ...] = field(default=MODES)


def in_turn(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers)


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(requires_grad=False)


# --- weights --------------------------------------------------------------------------------------------------------


def derived(x: Tensor, direction: Tensor, length: Tensor) -> Tensor:
    """Computes a weight from two others, and uses it twice."""
    weight = direction.sin() * length
    return torch.tanh(x @ weight) @ weight


def beside(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Gives two values that do not depend on the input but on the same weight."""
    rows = torch.ones(x.size(0), 3, dtype=x.dtype)
    return x @ weight.sin(), rows @ weight.sin().cos(), rows @ weight.sin()


def derived_weight() -> nn.Module:
    return Do(derived, torch.eye(3) + 0.1, torch.ones(3))


def values_beside() -> nn.Module:
    return Do(beside, torch.eye(3) + 0.1)


def product() -> nn.Module:
    return Do(lambda x, weight: Product.apply(x, weight).tanh(), torch.tensor([1.0, 2, 3]))


def same() -> nn.Module:
    return Do(lambda x, linear: linear(torch.tanh(linear(x))), nn.Linear(3, 3))


def constant() -> nn.Module:
    """Gives something that does not depend on its input."""
    return Do(lambda x, weight: weight.sin().expand(x.size(0), 3) * 1, torch.linspace(-1, 1, 3))


def normed() -> nn.Module:
    """Has weights that nothing uses, one that is a scalar, and a layer of PyTorch's with several."""
    parts = nn.LayerNorm(3), nn.GRUCell(3, 3), torch.tensor(1.5), nn.Linear(2, 2)
    return Do(lambda x, norm, cell, scale, _: cell(norm(x)) * scale, *parts)


def two_paths() -> nn.Module:
    """Its input reaches the output by two ways with weights, and past all weights."""
    return Do(lambda x, one, other: x + torch.tanh(one(x)) * other(x), nn.Linear(3, 3), nn.Linear(3, 3))


def branches() -> nn.Module:
    return Do(lambda x, one, other: (one(x), other(x)), Mix(), Mix())


class Hooked(nn.Module):
    """Changes the gradients of its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Mix(), Mix()

    def forward(self, x: Tensor) -> Tensor:
        x = self.changed(x * 1, 2.0)
        hidden = self.changed(self.one(x), -3.0)
        return self.changed(self.other(hidden), 0.5)

    @staticmethod
    def changed(x: Tensor, factor: float) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad * factor)
        return x


class Product(torch.autograd.Function):
    """x times w, as a node made in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad * w, (grad * x).sum(0)


class Returned(torch.autograd.Function):
    """Its input as it is, and twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def elsewhere(x: Tensor, layer: nn.Module) -> Tensor:
    """The layer runs in a thread of its own, whose nodes have numbers of their own."""
    grad = torch.is_grad_enabled()

    def run() -> Tensor:
        with torch.set_grad_enabled(grad):
            return layer(x)

    with ThreadPoolExecutor(1) as threads:
        return threads.submit(run).result()


def parametrised() -> list[nn.Module]:
    norms = nn.utils.parametrizations
    spectral = norms.spectral_norm(nn.Linear(3, 3)).eval()
    return [norms.weight_norm(nn.Linear(3, 3)), spectral, Mix(), nn.Linear(3, 3, bias=False)]


def with_frozen(*which: int) -> Callable[[], list[nn.Module]]:
    """Layers with skips across them, of which some learn nothing."""

    def layers() -> list[nn.Module]:
        (out, back), (near, near_end) = skip_pair(), skip_pair()
        made = [in_turn(Mix(), out), in_turn(Mix(), near), Mix(), in_turn(back, near_end, Mix())]
        return [frozen(layer) if index in which else layer for index, layer in enumerate(made)]

    return layers


WEIGHTS = {
    "one weight twice": Case(lambda: [same(), same(), derived_weight(), derived_weight()]),
    "no input used": Case(lambda: [Mix(), constant(), Mix(), Mix()]),
    "no input used at the end": Case(lambda: [Mix(), Mix(), Mix(), constant()]),
    "values beside": Case(lambda: [values_beside(), Mix(), in_turn(Narrow(), values_beside()), Narrow()]),
    "hooks": Case(lambda: [Hooked(), Mix(), Hooked(), in_turn(Hooked(), Hooked())]),
    "no weights": Case(lambda: [nn.Tanh(), Mix(), nn.Identity(), nn.Tanh()]),
    "weights of all kinds": Case(lambda: [normed(), normed(), two_paths(), two_paths()]),
    "weights of functions made in Python": Case(lambda: [product() for _ in range(4)]),
    "a function that returns its input": Case(
        lambda: [Do(Returned.apply), in_turn(Mix(), Do(Returned.apply)), in_turn(Do(Returned.apply), Mix()),
                 Do(Returned.apply)]
    ),
    "weights that are parametrised": Case(parametrised),
    "a layer with a thread": Case(lambda: [Mix(), Do(elsewhere, Mix()), Do(elsewhere, Mix()), Mix()]),
    "an output that the loss leaves out": Case(
        lambda: [Mix(), Mix(), Mix(), branches()], loss=lambda output, target: mean_loss(output[0], target)
    ),
    "an output that the next layer leaves out": Case(lambda: [Mix(), branches(), Do(lambda values: values[1]), Mix()]),
    "tokens": Case(lambda: [Embed(), Mix(), Widen(), Narrow()], lambda _: torch.arange(7) % 5),
    "large tensors": Case(
        lambda: [nn.Linear(64, 64), in_turn(nn.Tanh(), nn.Linear(64, 64)), nn.Linear(64, 64), nn.Tanh()],
        lambda needs: samples(7, 130, 64, requires_grad=needs),
    ),
    **{f"frozen {which}": Case(with_frozen(*which), lambda _: samples(7, 3, requires_grad=False))
       for which in ([0], [1], [0, 1], [3], [0, 1, 2], [0, 1, 2, 3])},
    **{f"frozen {which} and a gradient of the batch": Case(with_frozen(*which), lambda _: samples(7, 3))
       for which in ([0], [0, 1, 2, 3])},
}  # fmt: skip


# --- values ---------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


FORMS = {
    "list": (lambda y: [y, y * 2], lambda v: v[0] + v[1]),
    "dict": (lambda y: {"a": y, "b": (y * 2, None)}, lambda v: v["a"] + v["b"][0]),
    "nested": (lambda y: ((y, y * 2), True), lambda v: v[0][0] + v[0][1] if v[1] is True else None),
    "named": (lambda y: Pair(y, y * 2), lambda v: v.first + v.second),
    "text": (lambda y: (y, "sum", None, y * 2), lambda v: v[0] + v[3] if v[1:3] == ("sum", None) else None),
    "no tensors": (
        lambda y: (y, {"factor": 3, "shift": y.detach().mean(1, keepdim=True)}),
        lambda v: v[0] * v[1]["factor"] + v[1]["shift"],
    ),
}


def handing_on(*forms: str) -> Callable[[], list[nn.Module]]:
    """Layers of which each hands on another form."""
    takes = [lambda x: x, *(FORMS[form][1] for form in forms)]
    gives = [*(FORMS[form][0] for form in forms), lambda x: x]
    return lambda: [
        in_turn(Do(take), Mix(), Do(give)) for take, give in zip(takes, gives, strict=True)
    ]  # fmt: skip


class Box:
    """What no pytree knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def within_a_partition() -> list[nn.Module]:
    """Between layers of a partition, autograd knows what shares memory, and layers know which tensor is which."""
    kept: list[Tensor] = []

    def share(x: Tensor, layer: nn.Module) -> tuple[Tensor, Tensor]:
        kept[:] = [layer(x)]
        return kept[0], kept[0][..., :2]

    def write(values: tuple[Tensor, Tensor]) -> Tensor:
        values[1].mul_(3)
        return values[0] * 2 + kept[0] ** 2 + values[1].sum(-1, keepdim=True)

    shared = in_turn(Do(share, nn.Linear(3, 3)), Do(write))
    return [shared, Mix(), in_turn(Mix(), Do(Box), Do(lambda box: box.value)), Mix()]


def pair_of(needs: bool) -> tuple[Tensor, Tensor]:
    return samples(7, 3, requires_grad=needs), samples(7, 3, requires_grad=False).cos()


def using(use: Callable[[Tensor, Any], Tensor]) -> nn.Module:
    """(x, value) -> (what a layer makes of x and the value, the value)."""
    return Do(lambda values, linear: (linear(use(*values)), nn.Identity()(values[1])), nn.Linear(3, 3))


def making(make: Callable[..., Any]) -> nn.Module:
    """(x, value) -> (a layer's result, what is made of both and a weight)."""
    parts = nn.Linear(3, 3), torch.linspace(0.5, 2, 3)
    return Do(lambda values, linear, weight: (linear(values[0]), make(*values, weight)), *parts)


class Through(torch.autograd.Function):
    """Hands on the value, and gives its gradient to the weight."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, weight: Tensor) -> Tensor:
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.sum(0)


def needs_none(value: Tensor) -> Tensor:
    assert not value.requires_grad
    return value


def first(values: Any) -> Tensor:
    return values[0]


def scaled(x: Tensor, value: Tensor) -> Tensor:
    return x * value


def weighed(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.sparse.mm(matrix, x.t()).t()


def from_jagged(x: Tensor, value: Tensor) -> Tensor:
    return x * value.to_padded_tensor(0.0)


USES = (
    lambda x, value: x * needs_none(value),
    lambda x, value: x * torch.from_numpy(value.numpy() * 2),
    lambda x, value: x * torch.mul(value, 2, out=value.clone()),
)
jagged = partial(torch.nested.as_nested_tensor, layout=torch.jagged)
MADE = {
    "mask": (lambda x, given, weight: (x > 0).double(), scaled),
    "detached": (lambda x, given, weight: x.detach()[:, :1], scaled),
    "complex": (lambda x, given, weight: torch.polar(x.detach().abs(), x.detach()), lambda x, value: (x * value).abs()),
    "coo": (lambda x, given, weight: torch.eye(3).double().to_sparse(), weighed),
    "csr": (lambda x, given, weight: torch.eye(3).double().to_sparse_csr(), weighed),
    "coo with a gradient": (lambda x, given, weight: (x * weight).to_sparse(), lambda x, value: x * value.to_dense()),
    "csr with a gradient": (lambda x, given, weight: torch.diag(weight).to_sparse_csr(), weighed),
    "jagged": (lambda x, given, weight: torch.nested.nested_tensor([*x.detach()], layout=torch.jagged), from_jagged),
    "view of an input": (lambda x, given, weight: given.view(-1, 3), scaled),
    "clone of an input": (lambda x, given, weight: given.clone(), scaled),
}


def made(make: Callable[..., Any], use: Callable[..., Tensor]) -> Callable[[], list[nn.Module]]:
    return lambda: [making(make), using(use), using(use), Do(first)]


def changed_by_a_weight(function: Callable[[Tensor, Tensor], Tensor]) -> Case:
    """A value that needs a gradient only behind the layer that hands it on."""
    return Case(
        lambda: [
            using(lambda x, value: x * value.sin()),
            making(lambda _, given, weight: function(given, weight)),
            Do(lambda values: values[0] * values[1]),
            Mix(),
        ],
        lambda _: pair_of(needs=True),
    )


VALUES = {
    "tuples": Case(lambda: [Mix(), Widen(), in_turn(Tag(), Mix()), in_turn(Widen(), Narrow(), Mix())]),
    "lists, dicts, nested tuples": Case(handing_on("list", "dict", "nested")),
    "named tuples, text and numbers": Case(handing_on("named", "text", "no tensors")),
    "within a partition": Case(within_a_partition),
    "a scalar and a number": Case(
        lambda: [in_turn(Mix(), Do(lambda x: {"x": x, "length": x.detach()[0].sum(), "count": 3})),
                 Do(lambda values: values["x"] * values["count"]), Mix(), Mix()]
    ),
    "values handed on": Case(lambda: [*map(using, USES), Do(first)], pair_of),
    "a value written to with a weight": changed_by_a_weight(Tensor.mul_),
    "a value returned with a weight": changed_by_a_weight(Through.apply),
    **{f"made: {name}": Case(made(*MADE[name]), pair_of) for name in MADE},
    "made: jagged with a gradient": Case(
        made(lambda x, given, weight: jagged([*(x * weight)]), from_jagged), pair_of, modes=("never",)
    ),
}  # fmt: skip
