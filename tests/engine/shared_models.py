"""Models with tensors that are written to, shared or stashed: more cases of the test in test_training.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.skip import pop, skippable, stash
from tests.engine.models import VALUES, WEIGHTS, Case, in_turn, needs_none, pair_of
from tests.engine.steps import samples
from tests.engine.support import Affine, Do, InPlace, Mix, skip_pair

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
    return Case(lambda: [Affine(), in_turn(Affine(), Do(before)), in_turn(Do(behind), Do(total)), Affine()])


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
