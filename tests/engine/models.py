"""Models that are hard to cut into partitions, each a case of the test that pipelines train like the plain module."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gpipe_bench.skip import pop, skippable, stash
from tests.engine.steps import mean_loss, samples
from tests.engine.support import MODES, Affine, Embed, InPlace, Mix, Narrow, Tag, Widen, skip_pair


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


class Do(nn.Module):
    """A function of what comes, after a layer with weights if it has one."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.function, self.layer = function, layer

    def forward(self, value: Any) -> Any:
        return self.function(value if self.layer is None else self.layer(value))


def frozen(layer: nn.Module) -> nn.Module:
    return layer.requires_grad_(requires_grad=False)


# --- weights --------------------------------------------------------------------------------------------------------


class Same(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Derived(nn.Module):
    """Computes its weight from two others, and uses it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.length = nn.Parameter(torch.eye(3) + 0.1), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.direction.sin() * self.length
        return torch.tanh(x @ weight) @ weight


class Constant(nn.Module):
    """Gives something that does not depend on its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sin().expand(x.size(0), 3) * 1


class Beside(nn.Module):
    """Gives beside its result two values that do not depend on its input but on the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(3) + 0.1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        weight = self.weight.sin()
        rows = torch.ones(x.size(0), 3, dtype=x.dtype)
        return x @ weight, rows @ weight.cos(), rows @ weight


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


class Normed(nn.Module):
    """Has weights that nothing uses, one that is a scalar, and a layer of PyTorch's with several."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.rest = nn.LayerNorm(3), nn.Linear(2, 2)
        self.cell = nn.GRUCell(3, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(self.norm(x)) * self.scale


class TwoPaths(nn.Module):
    """Its input reaches the output by two ways with weights, and past all weights."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.one(x)) * self.other(x)


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


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return Product.apply(x, self.weight).tanh()


class Returned(torch.autograd.Function):
    """Its input as it is, and twice its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Elsewhere(nn.Module):
    """Its layer runs in a thread of its own, whose nodes have numbers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Mix()

    def forward(self, x: Tensor) -> Tensor:
        grad = torch.is_grad_enabled()

        def run() -> Tensor:
            with torch.set_grad_enabled(grad):
                return self.layer(x)

        with ThreadPoolExecutor(1) as threads:
            return threads.submit(run).result()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Mix(), Mix()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.one(x), self.other(x)


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
    "one weight twice": Case(lambda: [Same(), Same(), Derived(), Derived()]),
    "no input used": Case(lambda: [Mix(), Constant(), Mix(), Mix()]),
    "no input used at the end": Case(lambda: [Mix(), Mix(), Mix(), Constant()]),
    "values beside": Case(lambda: [Beside(), Mix(), in_turn(Narrow(), Beside()), in_turn(Mix(), Narrow())]),
    "hooks": Case(lambda: [Hooked(), Mix(), Hooked(), in_turn(Hooked(), Hooked())]),
    "no weights": Case(lambda: [nn.Tanh(), Mix(), nn.Identity(), nn.Tanh()]),
    "weights of all kinds": Case(lambda: [Normed(), Normed(), TwoPaths(), TwoPaths()]),
    "weights of functions made in Python": Case(lambda: [Scale() for _ in range(4)]),
    "a function that returns its input": Case(
        lambda: [Do(Returned.apply), in_turn(Mix(), Do(Returned.apply)), in_turn(Do(Returned.apply), Mix()),
                 Do(Returned.apply)]
    ),
    "weights that are parametrised": Case(parametrised),
    "a layer with a thread": Case(lambda: [Mix(), Elsewhere(), Elsewhere(), Mix()]),
    "an output that the loss leaves out": Case(
        lambda: [Mix(), Mix(), Mix(), Branches()], loss=lambda output, target: mean_loss(output[0], target)
    ),
    "an output that the next layer leaves out": Case(lambda: [Mix(), Branches(), Do(lambda values: values[1]), Mix()]),
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
        nn.Sequential(Do(take), Do(give, Mix())) for take, give in zip(takes, gives, strict=True)
    ]  # fmt: skip


class Box:
    """What no pytree knows."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


class Shared(nn.Module):
    """Gives a tensor, a view of it, and keeps it aside."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.kept = self.layer(x)
        return self.kept, self.kept[..., :2]


class Writes(nn.Module):
    """Writes to one, and then reads all."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared = [shared]

    def forward(self, values: tuple[Tensor, Tensor]) -> Tensor:
        values[1].mul_(3)
        (shared,) = self.shared
        return values[0] * 2 + shared.kept**2 + values[1].sum(-1, keepdim=True)


def within_a_partition() -> list[nn.Module]:
    """Between layers of a partition, autograd knows what shares memory, and layers know which tensor is which."""
    shared = Shared()
    return [in_turn(shared, Writes(shared)), Mix(), in_turn(Do(Box, Mix()), Do(lambda box: box.value)), Mix()]


def pair_of(needs: bool) -> tuple[Tensor, Tensor]:
    return samples(7, 3, requires_grad=needs), samples(7, 3, requires_grad=False).cos()


class Uses(nn.Module):
    """(x, value) -> (what a layer makes of x and the value, the value)."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(3, 3), use

    def forward(self, values: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
        x, value = values
        return self.linear(self.use(x, value)), nn.Identity()(value)


class Makes(nn.Module):
    """(x, value) -> (a layer's result, what is made of both and a weight)."""

    def __init__(self, make: Callable[[Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(3, 3), make
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 3))

    def forward(self, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Any]:
        return self.linear(values[0]), self.make(*values, self.weight)


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


def making(make: Callable[..., Any], use: Callable[..., Tensor]) -> Callable[[], list[nn.Module]]:
    return lambda: [Makes(make), Uses(use), Uses(use), Do(first)]


def changed_by_a_weight(function: Callable[[Tensor, Tensor], Tensor]) -> Case:
    """A value that needs a gradient only behind the layer that hands it on."""
    make = Makes(lambda _, given, weight: function(given, weight))
    return Case(lambda: [Uses(lambda x, value: x * value.sin()), make, Do(lambda values: values[0] * values[1]), Mix()],
                lambda _: pair_of(needs=True))  # fmt: skip


VALUES = {
    "tuples": Case(lambda: [Mix(), Widen(), in_turn(Tag(), Mix()), in_turn(Widen(), Narrow(), Mix())]),
    "lists, dicts, nested tuples": Case(handing_on("list", "dict", "nested")),
    "named tuples, text and numbers": Case(handing_on("named", "text", "no tensors")),
    "within a partition": Case(within_a_partition),
    "a scalar and a number": Case(
        lambda: [Do(lambda x: {"x": x, "length": x.detach()[0].sum(), "count": 3}, Mix()),
                 Do(lambda values: values["x"] * values["count"]), Mix(), Mix()]
    ),
    "values handed on": Case(lambda: [*map(Uses, USES), Do(first)], pair_of),
    "a value written to with a weight": changed_by_a_weight(Tensor.mul_),
    "a value returned with a weight": changed_by_a_weight(Through.apply),
    **{f"made: {name}": Case(making(*MADE[name]), pair_of) for name in MADE},
    "made: jagged with a gradient": Case(
        making(lambda x, given, weight: jagged([*(x * weight)]), from_jagged), pair_of, modes=("never",)
    ),
}  # fmt: skip


# --- memory that is written to or shared ----------------------------------------------------------------------------


@skippable(stash=["same"])
class Keep(nn.Module):
    """Stashes what it passes on."""

    def forward(self, x: Tensor) -> Any:
        yield stash("same", x)
        return x


@skippable(pop=["same"])
class Add(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("same")
        return x + skip


def twice(x: Tensor) -> tuple[Tensor, Tensor]:
    return x, x


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    both = torch.cat([x, x * 2], 1)
    return both[:, :3], both[:, 3:]


def rows_of_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Every second column each: memory that interleaves and does not overlap."""
    both = torch.stack([x, x * 2], 2)
    return both[..., 0], both[..., 1]


def write_first(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return values[0].mul_(0.5), values[1]


def write_second(values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return values[0], values[1].mul_(0.5)


def total(values: tuple[Tensor, ...]) -> Tensor:
    return values[0] * 2 + values[1].sin()


def shared(before: Callable[..., Any], behind: Callable[..., Any]) -> Case:
    """The second partition hands on what shares memory, or does not."""
    return Case(lambda: [Affine(), Do(before, Affine()), in_turn(Do(behind), Do(total)), Affine()])


def handed_on(make: Callable[[], nn.Module]) -> Case:
    """A partition that gives its input, or a view of it, from which the next one goes on in place."""
    return Case(lambda: [Affine(), make(), in_turn(InPlace(), nn.Flatten()), Affine()])


def masked(values: tuple[Tensor, Tensor]) -> Tensor:
    """Changes the mask, and applies it."""
    return values[0] * values[1].clamp_(min=0)


MEMORY = {
    "in place": Case(lambda: [Affine(), InPlace(), in_turn(Affine(), nn.ReLU(inplace=True)), Affine()]),
    # PyTorch refuses to write to a leaf that requires a gradient
    "in place at the batch": Case(
        lambda: [in_turn(InPlace(), Affine()), Affine(), in_turn(InPlace(), Mix()), Mix()],
        lambda _: samples(7, 3, requires_grad=False),
    ),
    "the batch handed on": Case(
        lambda: [nn.Identity(), InPlace(), Affine(), Affine()], lambda _: samples(7, 3, requires_grad=False)
    ),
    "a view of the batch handed on": Case(
        lambda: [nn.Flatten(1), InPlace(), Affine(), Affine()], lambda _: samples(7, 3, requires_grad=False)
    ),
    "one of the batch handed on": Case(
        lambda: [Do(lambda values: (values[0].sin(), values[1])), Do(masked), Affine(), Affine()], pair_of
    ),
    "an input handed on": handed_on(nn.Identity),
    "an input flattened": handed_on(nn.Flatten),
    "an input with another dimension": handed_on(lambda: nn.Unflatten(1, (3, 1))),
    "a clone written to": shared(twice, lambda values: (values[0].clone().mul_(0.5), values[1])),
    "a clone made before": shared(lambda x: (x, x.clone()), write_first),
    "halves": shared(halves, write_first),
    "interleaved columns": shared(rows_of_columns, write_second),
    "one twice": shared(twice, lambda values: values),
    "a third written to": shared(
        lambda x: (x, x, x * 2), lambda values: (values[0] + values[2].mul_(0.5), values[1])
    ),
    "written to before the cut": shared(lambda x: write_first(twice(x)), lambda values: values),
    "one twice in a dict": shared(
        lambda x: {"a": x, "b": x}, lambda values: (values["a"] * 2, values["b"])
    ),
    **{f"a batch with {name} twice": Case(
        lambda: [Do(lambda values: values), in_turn(Do(total), Affine()), Affine(), Affine()],
        lambda _, share=share: share(samples(8, 3, requires_grad=False)),
    ) for name, share in {"a tensor": lambda x: twice(x[:7]), "memory": lambda x: (x[:7], x[:7].view(-1, 3)),
                          "rows": lambda x: (x[:-1], x[1:])}.items()},
}  # fmt: skip


# --- skips ----------------------------------------------------------------------------------------------------------


@skippable(stash=["skip"])
class Part(nn.Module):
    """(x, value) -> x; stashes the value, or integers."""

    def __init__(self, choose: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.choose = choose

    def forward(self, values: Any) -> Any:
        yield stash("skip", self.choose(values))
        return values[0] if isinstance(values, tuple) else values


@skippable(pop=["skip"])
class Times(nn.Module):
    def forward(self, x: Tensor) -> Any:
        skip = yield pop("skip")
        return x * (skip if skip.requires_grad else needs_none(skip))


def with_skip(between: nn.Module, **options: bool) -> list[nn.Module]:
    opening, closing = skip_pair(**options)
    return [in_turn(Mix(), opening), Mix(), between, in_turn(closing, Mix())]


SKIPS = {
    "a skip past two partitions, and none": Case(
        lambda: [in_turn(Mix(), (pair := skip_pair())[0]), Mix(), (none := skip_pair(nothing=True))[0],
                 in_turn(pair[1], none[1], Mix())]
    ),
    "a skip that is not used": Case(lambda: with_skip(Mix(), ignore=True)),
    "a skip that alone is used": Case(lambda: with_skip(Do(torch.ones_like))),
    "a skip of a mask": Case(lambda: [Part(lambda values: values[1]), Mix(), Mix(), Times()], pair_of),
    "a skip of integers": Case(lambda: [Mix(), Part(lambda x: (x > 0).long()), Mix(), in_turn(Times(), Mix())]),
    "a skip popped before a write": Case(
        lambda: [in_turn(Affine(), Keep()), in_turn(Add(), nn.ReLU(inplace=True)), Affine(), Affine()]
    ),
    "a skip that is the tensor itself, past writes to others": Case(
        lambda: [in_turn(Affine(), Keep()), in_turn(Affine(), nn.ReLU(inplace=True), Affine()), nn.ReLU(inplace=True),
                 in_turn(Affine(), Add(), Affine())]
    ),
}  # fmt: skip

CASES = {**WEIGHTS, **VALUES, **MEMORY, **SKIPS}
