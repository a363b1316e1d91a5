"""Whatever is switched, a pipeline gives the output, loss and gradients of the plain module."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.skip import verify_skippables
from tests.engine.support import (
    MODES,
    WIDTH,
    Affine,
    Embed,
    InPlace,
    Mix,
    Narrow,
    Tag,
    Widen,
    assert_same,
    on_cpu,
    skip_pair,
    train_step,
)

pytestmark = pytest.mark.usefixtures("either_backward")

# Units that no skip comes between: an in-place layer may only follow one whose result autograd does not keep.
UNITS = {"mix": [Mix], "in_place": [Affine, InPlace], "widen": [Widen], "tag": [Tag], "narrow": [Narrow]}
EXAMPLES = settings(max_examples=200)


@st.composite
def models(draw: st.DrawFn, first: list[type[nn.Module]]) -> nn.Sequential:
    """Layers in any order, with up to three skips between any two places of it."""
    torch.manual_seed(draw(st.integers(0, 99)))
    names = draw(st.lists(st.sampled_from(list(UNITS)), min_size=1, max_size=6))
    units = [[make() for make in makers] for makers in (first, *(UNITS[name] for name in names))]
    for _ in range(draw(st.integers(0, 3))):
        start, end = sorted(draw(st.tuples(*[st.integers(1, len(units))] * 2)))
        opening, closing = skip_pair(nothing=draw(st.booleans()), ignore=draw(st.booleans()))
        units[end:end] = [[closing]]
        units[start:start] = [[opening]]
    layers = [layer for unit in units for layer in unit]
    for index in draw(st.sets(st.integers(0, len(layers) - 1), max_size=3)):
        layers[index].requires_grad_(requires_grad=False)
    module = nn.Sequential(*layers).double()
    verify_skippables(module)
    return module


@st.composite
def balances(draw: st.DrawFn, layers: int) -> list[int]:
    """A contiguous split into at most four partitions."""
    cuts = draw(st.sets(st.integers(1, layers - 1), max_size=3)) if layers > 1 else set()
    edges = [0, *sorted(cuts), layers]
    return [after - before for before, after in itertools.pairwise(edges)]


@dataclass
class Case:
    plain: nn.Sequential
    pipe: GPipe
    x: Any


@st.composite
def cases(draw: st.DrawFn) -> Case:
    kind = draw(st.sampled_from(["tensor", "integers", "tuple"]))
    size = draw(st.integers(1, 7))
    generator = torch.Generator().manual_seed(size)
    numbers = torch.randn(size, WIDTH, generator=generator, dtype=torch.float64)
    numbers.requires_grad_(draw(st.booleans()))
    integers = torch.randint(5, (size,), generator=generator)
    x = {"tensor": numbers, "integers": integers, "tuple": (integers, numbers)}[kind]
    plain = draw(models([] if kind == "tensor" else [Embed]))
    pipe = on_cpu(
        copy.deepcopy(plain),
        draw(balances(len(plain))),
        chunks=draw(st.integers(1, 5)),
        checkpoint=draw(st.sampled_from(MODES)),
        components=Components(*draw(st.tuples(*[st.booleans()] * 5))),
        transfer=draw(st.sampled_from(["direct", "host"])),
    )
    return Case(plain, pipe, x)


def trains(case: Case) -> bool:
    return any(parameter.requires_grad for parameter in case.plain.parameters()) or any(
        value.requires_grad for value in (case.x if isinstance(case.x, tuple) else (case.x,))
    )


@EXAMPLES
@given(cases())
def test_a_step_equals_that_of_the_plain_module(case):
    if not trains(case):
        return
    assert_same(train_step(case.pipe, case.x), train_step(case.plain, case.x))


@settings(EXAMPLES, max_examples=40)
@given(cases())
def test_the_second_step_equals_that_of_the_plain_module_too(case):
    if not trains(case):
        return
    train_step(case.pipe, case.x)
    assert_same(train_step(case.pipe, case.x), train_step(case.plain, case.x))


@settings(EXAMPLES, max_examples=60)
@given(cases())
def test_evaluation_equals_that_of_the_plain_module(case):
    with torch.no_grad():
        torch.testing.assert_close(case.pipe.eval()(case.x), case.plain.eval()(case.x))


@settings(EXAMPLES, max_examples=40)
@given(cases())
def test_inputs_are_left_as_they_were(case):
    values = case.x if isinstance(case.x, tuple) else (case.x,)
    before = [value.detach().clone() for value in values]
    case.pipe(case.x)
    torch.testing.assert_close([value.detach() for value in values], before)
