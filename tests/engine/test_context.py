"""Modes and context variables of the calling thread hold in workers and recomputations."""

from __future__ import annotations

import copy
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from torch._functorch import config as compiler

from gpipe_bench import Components, is_recomputing
from tests.engine.steps import scheduled
from tests.engine.support import MODES, SOME, Do, label

WIDTH = 16
CPU = [torch.device("cpu")]


def batch(size: int = 8) -> torch.Tensor:
    return torch.randn(size, WIDTH, generator=torch.Generator().manual_seed(2))


class Modes(nn.Module):
    """Notes, first pass and recomputation apart, under which modes it runs and what its product's type is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first, self.again = set(), set()

    def forward(self, x):
        y = self.linear(x)
        modes = (
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            y.dtype,
        )
        (self.again if is_recomputing() else self.first).add(modes)
        return y


def pipeline(either, **options):
    return either(nn.Sequential(Modes(), Modes()), [1, 1], chunks=4, **options)


@pytest.mark.parametrize("components", SOME, ids=label)
def test_autocast_reaches_workers_and_recomputations(either, components):
    pipe = pipeline(either, components=components, checkpoint="always")
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe(batch()).float().sum()
    loss.backward()
    for layer in pipe:
        assert layer.first == {(False, False, True, torch.bfloat16)}
        assert layer.again == {(False, True, True, torch.bfloat16)}


@pytest.mark.parametrize("clock_cycle", [True, False])
def test_no_autocast_stays_no_autocast(either, clock_cycle):
    """Not even when the backward pass is called within autocast."""
    pipe = pipeline(either, components=Components(clock_cycle=clock_cycle), checkpoint="always")
    loss = pipe(batch()).sum()
    with torch.autocast("cpu", torch.bfloat16):
        loss.backward()
    for layer in pipe:
        assert layer.first == {(False, False, False, torch.float32)}
        assert layer.again == {(False, True, False, torch.float32)}


@pytest.mark.parametrize("clock_cycle", [True, False])
@pytest.mark.parametrize(
    ("mode", "expected"),
    [(torch.no_grad, (False, False)), (torch.inference_mode, (True, False)), (torch.enable_grad, (False, True))],
)
def test_grad_and_inference_mode_reach_the_workers(either, mode, expected, clock_cycle):
    pipe = pipeline(either, components=Components(clock_cycle=clock_cycle), checkpoint="never")
    with mode():
        pipe(batch())
    assert {modes[:2] for layer in pipe for modes in layer.first} == {expected}


@pytest.mark.parametrize("components", SOME, ids=label)
@pytest.mark.parametrize("checkpoint", MODES)
def test_without_grad_there_is_no_graph(either, components, checkpoint):
    pipe = pipeline(either, components=components, checkpoint=checkpoint, transfer="host")
    with torch.no_grad():
        output = pipe(batch().requires_grad_())
    assert output.grad_fn is None
    assert not output.requires_grad


def test_results_of_inference_mode_are_inference_tensors(either):
    with torch.inference_mode():
        output = pipeline(either)(batch())
    assert output.is_inference()


def test_training_works_after_inference(either):
    """What the engine makes once and keeps must not be made an inference tensor."""
    pipe = pipeline(either, checkpoint="always")
    with torch.inference_mode():
        pipe(batch())
    pipe(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


def test_a_recomputation_has_the_modes_of_its_forward_pass(either):
    """Two forward passes under different modes, then both backward passes."""
    pipe = pipeline(either, checkpoint="always")
    plain = pipe(batch()).sum()
    with torch.autocast("cpu", torch.bfloat16):
        cast = pipe(batch()).float().sum()
    pipe[0].again.clear()
    plain.backward()
    assert {modes[2] for modes in pipe[0].again} == {False}
    pipe[0].again.clear()
    cast.backward()
    assert {modes[2] for modes in pipe[0].again} == {True}


# --- gradients under autocast ------------------------------------------------------------------------------------


def gradients(model, pieces):
    model.zero_grad()
    for piece in pieces:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(piece).float().square().sum()
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


def gradients_of(pipe, *, within: bool):
    """Those of a step, whose backward pass may run within autocast, too."""
    pipe.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe(batch()).float().square().sum()
        if within:
            loss.backward()
    if not within:
        loss.backward()
    return [parameter.grad for parameter in pipe.parameters()]


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", SOME, ids=label)
def test_gradients_equal_those_of_the_microbatches(either, components, checkpoint):
    """The trap (until PyTorch stopped caching without grad): a weight cast in a first pass, reused, has no gradient."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    pipe = either(copy.deepcopy(plain), [2, 2], chunks=4, checkpoint=checkpoint, components=components)
    expected = gradients(plain, batch().chunk(4))
    for within in (False, True):
        torch.testing.assert_close(gradients_of(pipe, within=within), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("workers", ["always", "never"])
def test_autocast_in_a_schedule(schedule, checkpoint, workers):
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=4, checkpoint=checkpoint, workers=workers)
    seen = set()
    for layer in pipe:
        layer[0].register_forward_hook(lambda _layer, _given, output: seen.add(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(batch(), None, lambda output, _: output.float().square().sum(), reduction="sum")
    assert seen == {torch.bfloat16}
    found = [parameter.grad for parameter in pipe.parameters()]
    torch.testing.assert_close(found, gradients(plain, batch().chunk(4)), rtol=0.02, atol=0.02)


def test_the_cache_stays_off_where_the_caller_has_it_off(either):
    seen = []

    def ask(x):
        seen.append(torch.is_autocast_cache_enabled())
        return x * 1

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        either(nn.Sequential(Do(ask), Do(ask)), [1, 1], chunks=2)(batch())
    assert seen == [False] * 4


# --- context variables -----------------------------------------------------------------------------------------------

setting = ContextVar("setting", default="of nobody")


class Settings(nn.Module):
    """Notes the values of two settings, first pass and recomputation apart; PyTorch 2.11 keeps its own elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.first, self.again = set(), set()

    def forward(self, x):
        theirs = compiler.donated_buffer if torch.__version__ >= "2.13" else False
        (self.again if is_recomputing() else self.first).add((setting.get(), theirs))
        return self.linear(x)


@pytest.mark.parametrize("workers", ["always", "never"])
def test_context_variables_reach_workers_and_recomputations(either, workers):
    """Those of the forward pass, as the other modes; among them the settings of torch.compile."""
    pipe = either(nn.Sequential(Settings(), Settings()), [1, 1], chunks=4, checkpoint="always", workers=workers)
    before = setting.set("of the caller")
    with compiler.patch(donated_buffer=False):
        output = pipe(batch())
    setting.reset(before)
    output.sum().backward()
    for layer in pipe:
        assert layer.first == layer.again == {("of the caller", False)}


def test_a_setting_of_a_layer_is_its_own(either):
    class Sets(Settings):
        def forward(self, x):
            setting.set("of a layer")
            return super().forward(x)

    pipe = either(nn.Sequential(Sets(), Settings()), [1, 1], chunks=4, checkpoint="always", workers="always")
    pipe(batch()).sum().backward()
    assert setting.get() == "of nobody"
