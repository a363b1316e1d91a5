"""Random models whose layers hand on values of every kind: loss and gradients are those of the plain module.

Each layer gives a few values in random order: floats with and without a gradient, new ones and some that it was given,
views, masks, integers, None and text, in tuples, lists and dicts. Skips take some of them past layers.
"""

from __future__ import annotations

import copy
import os
import random
from zlib import crc32

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from gpipe_bench import Components
from gpipe_bench.skip import Namespace, pop, skippable, stash
from tests.engine.steps import ALL, DOUBLE, scheduled
from tests.engine.support import FACTORIAL, MODES

# For each schedule and checkpoint mode.
MODELS = int(os.environ.get("MIXED_MODELS", "5"))

KINDS = {
    "hidden": lambda layer, h, given: h,
    "scaled": lambda layer, h, given: h * 0.5,
    "view": lambda layer, h, given: h[:, : max(h.size(1) // 2, 1)],
    "detached": lambda layer, h, given: h.detach(),
    "first, as given": lambda layer, h, given: given[0],
    "last, as given": lambda layer, h, given: given[-1],
    "any, as given": lambda layer, h, given: given[layer.number % len(given)],
    "view of what is given": lambda layer, h, given: given[layer.number % len(given)][..., 1:],
    "new, frozen": lambda layer, h, given: torch.ones_like(h),
    "expanded": lambda layer, h, given: torch.linspace(0, 1, h.size(1), dtype=h.dtype).expand_as(h),
    "of frozen values": lambda layer, h, given: given[layer.number % len(given)].detach() + 1,
    "integers": lambda layer, h, given: (h.detach()[:, 0] > 0).long(),
    "mask": lambda layer, h, given: h.detach() > 0,
    "weight": lambda layer, h, given: layer.scale,
    "of weights": lambda layer, h, given: layer.scale.exp().expand_as(h),
    "of weights and data": lambda layer, h, given: layer.linear(h.detach()),
    "none": lambda layer, h, given: None,
    "text": lambda layer, h, given: "text",
}
FROZEN = ["detached", "new, frozen", "expanded", "of frozen values", "last, as given"]
FORMS = [
    tuple,
    list,
    lambda values: {str(place): value for place, value in enumerate(values)},
    lambda values: ({"first": values[0]}, [*values[1:]]),
    lambda values: values[0] if len(values) == 1 else tuple(values),
]


class Layer(nn.Module):
    """Mixes all tensors that it is given, and gives some values of :data:`KINDS`."""

    def __init__(self, draw: random.Random, width: int, *, last: bool) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), nn.Parameter(torch.rand(width))
        self.number = draw.randrange(100)
        # A sole gradient among floats without one, or anything.
        kinds = draw.choice([FROZEN, list(KINDS)])
        self.kinds = ["hidden", *draw.choices(kinds, k=draw.choice([0, 1, 1, 2, 4]))]
        draw.shuffle(self.kinds)
        self.form, self.last = draw.randrange(len(FORMS)), last
        self.requires_grad_(draw.random() < 0.85)

    def forward(self, values):
        given = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        rows, width = max(given, key=torch.Tensor.dim).size(0), self.scale.size(0)
        total = torch.zeros(rows, width, dtype=self.scale.dtype)
        for place, value in enumerate(given):
            wide = value.to(total.dtype)
            wide = wide[:, None] if value.dim() == 1 and not value.is_floating_point() else wide
            total = total + functional.pad(wide, (0, width - wide.size(-1))) * (0.3 + place / 7)
        h = torch.tanh(self.linear(total))
        floats = [value for value in given if value.is_floating_point()]
        return h if self.last else FORMS[self.form]([KINDS[kind](self, h, floats) for kind in self.kinds])


@skippable(stash=["skip"])
class Stash(nn.Module):
    def __init__(self, namespace, number):
        super().__init__()
        self.isolate(namespace)
        self.number = number

    def forward(self, values):
        tensors = [value for value in tree_leaves(values) if isinstance(value, torch.Tensor)]
        yield stash("skip", tensors[self.number % len(tensors)])
        return values


@skippable(pop=["skip"])
class Pop(nn.Module):
    def __init__(self, namespace):
        super().__init__()
        self.isolate(namespace)

    def forward(self, values):
        skip = yield pop("skip")
        return {"skip": skip, "values": values}


def make_model(draw: random.Random, width: int) -> nn.Sequential:
    count = draw.randint(4, 7)
    layers = [Layer(draw, width, last=place == count - 1) for place in range(count)]
    for _ in range(draw.choice([0, 1, 2])):
        start, end = sorted(draw.sample(range(1, len(layers)), 2))
        namespace = Namespace()
        layers.insert(end, Pop(namespace))
        layers.insert(start, Stash(namespace, draw.randrange(100)))
    return nn.Sequential(*layers).double()


def gradients(model, inputs):
    tensors = [*model.parameters(), *inputs]
    return [torch.zeros_like(each) if each.grad is None else each.grad for each in tensors]


def assert_close(found, expected, seed):
    for place, (one, other) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(one, other, msg=lambda text: f"model {seed}, number {place} of all: {text}")  # noqa: B023


def make_case(seed, schedule, checkpoint):
    """A model, its pipeline, and a batch."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    width, rows = draw.choice([(2, 9), (3, 5), (64, 400)])  # the last has 64 KiB and more per micro-batch
    model = make_model(draw, width)
    count = 4 if schedule in DOUBLE else draw.choice([1, 2, 3, 4])
    cuts = sorted(draw.sample(range(1, len(model)), count - 1))
    balance = [end - start for start, end in zip([0, *cuts], [*cuts, len(model)], strict=True)]
    chunks = draw.choice([1, 2, 3]) if width > 3 else draw.choice([1, 2, 3, 5])
    options = {
        "workers": draw.choice(["always", "never"]),
        "transfer": draw.choice(["direct", "host"]),
        "components": draw.choice([Components(), draw.choice(FACTORIAL)]),
    }
    pipe = scheduled(copy.deepcopy(model), balance, schedule, chunks=chunks, checkpoint=checkpoint, **options)
    x = torch.rand(rows, width, dtype=torch.float64, requires_grad=draw.random() < 0.5)
    table = torch.rand(rows, width, dtype=torch.float64)
    batch = draw.choice([x, (x, table), (table, x), (x, torch.arange(rows) % 3, table)])
    return model, pipe, batch


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ALL)
def test_gradients_are_those_of_the_plain_module(schedule, checkpoint):
    for number in range(MODELS):
        seed = crc32(f"{schedule} {checkpoint} {number}".encode())
        model, pipe, batch = make_case(seed, schedule, checkpoint)
        inputs = [each for each in (batch if isinstance(batch, tuple) else (batch,)) if each.requires_grad]
        output = model(batch)
        target = torch.linspace(-1, 1, output.numel(), dtype=torch.float64).view_as(output)
        expected = functional.mse_loss(output, target)
        if not expected.requires_grad:
            continue
        expected.backward()
        wanted = gradients(model, inputs)
        for _ in range(2):
            pipe.zero_grad()
            for each in inputs:
                each.grad = None
            if schedule == "gpipe" and number % 2:
                found = functional.mse_loss(pipe(batch), target)
                found.backward()
            else:
                found = pipe.step(batch, target, functional.mse_loss)
            assert_close([found.detach(), *gradients(pipe, inputs)], [expected.detach(), *wanted], seed)
