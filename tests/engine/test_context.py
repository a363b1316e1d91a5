"""Modes and context variables of the calling thread hold in workers and recomputations."""

from __future__ import annotations

import copy
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from torch._functorch import config as compiler

from gpipe_bench import Components, is_recomputing
from gpipe_bench.engine.context import ExecutionContext
from tests.engine.support import FACTORIAL, MODES, label, on_cpu

pytestmark = pytest.mark.usefixtures("either_backward")

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


def pipeline(**options):
    return on_cpu(nn.Sequential(Modes(), Modes()), [1, 1], chunks=4, **options)


@pytest.mark.parametrize("components", FACTORIAL, ids=label)
def test_autocast_reaches_workers_and_recomputations(components):
    pipe = pipeline(components=components, checkpoint="always")
    with torch.autocast("cpu", torch.bfloat16):
        loss = pipe(batch()).float().sum()
    loss.backward()
    for layer in pipe:
        assert layer.first == {(False, False, True, torch.bfloat16)}
        assert layer.again == {(False, True, True, torch.bfloat16)}


@pytest.mark.parametrize("clock_cycle", [True, False])
def test_no_autocast_stays_no_autocast(clock_cycle):
    """Not even when the backward pass is called within autocast."""
    pipe = pipeline(components=Components(clock_cycle=clock_cycle), checkpoint="always")
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
def test_grad_and_inference_mode_reach_the_workers(mode, expected, clock_cycle):
    pipe = pipeline(components=Components(clock_cycle=clock_cycle), checkpoint="never")
    with mode():
        pipe(batch())
    assert {modes[:2] for layer in pipe for modes in layer.first} == {expected}


@pytest.mark.parametrize("components", FACTORIAL, ids=label)
@pytest.mark.parametrize("checkpoint", MODES)
def test_without_grad_there_is_no_graph(components, checkpoint):
    pipe = pipeline(components=components, checkpoint=checkpoint, transfer="host")
    with torch.no_grad():
        output = pipe(batch().requires_grad_())
    assert output.grad_fn is None
    assert not output.requires_grad


def test_results_of_inference_mode_are_inference_tensors():
    with torch.inference_mode():
        output = pipeline()(batch())
    assert output.is_inference()


def test_training_works_after_inference():
    """What the engine makes once and keeps must not be made an inference tensor."""
    pipe = pipeline(checkpoint="always")
    with torch.inference_mode():
        pipe(batch())
    pipe(batch()).sum().backward()
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.parametrize("clock_cycle", [True, False])
def test_modes_of_the_calling_thread_are_left_alone(clock_cycle):
    pipe = pipeline(components=Components(clock_cycle=clock_cycle), checkpoint="always")
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        before = ExecutionContext.capture(CPU)
        pipe(batch()).float().sum().backward()
        assert ExecutionContext.capture(CPU) == before
    default = ExecutionContext.capture(CPU)
    pipe(batch()).sum().backward()
    assert ExecutionContext.capture(CPU) == default


def test_a_recomputation_has_the_modes_of_its_forward_pass():
    """Two forward passes under different modes, then both backward passes."""
    pipe = pipeline(checkpoint="always")
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


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
def test_gradients_equal_those_of_the_microbatches(components, checkpoint):
    """The trap (until PyTorch stopped caching without grad): a weight cast in a first pass, reused, has no gradient."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    pipe = on_cpu(copy.deepcopy(plain), [2, 2], chunks=4, checkpoint=checkpoint, components=components)
    expected = gradients(plain, batch().chunk(4))
    torch.testing.assert_close(gradients(pipe, [batch()]), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("checkpoint", MODES)
def test_gradients_are_right_when_backward_runs_within_autocast(checkpoint):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    pipe = on_cpu(copy.deepcopy(plain), [2, 2], chunks=4, checkpoint=checkpoint)
    for _ in range(2):
        pipe.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            pipe(batch()).float().square().sum().backward()
        found = [parameter.grad for parameter in pipe.parameters()]
        torch.testing.assert_close(found, gradients(plain, batch().chunk(4)), rtol=0.02, atol=0.02)


def test_the_cache_stays_off_where_the_caller_has_it_off():
    seen = []

    class Ask(nn.Module):
        def forward(self, x):
            seen.append(torch.is_autocast_cache_enabled())
            return x * 1

    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        on_cpu(nn.Sequential(Ask(), Ask()), [1, 1], chunks=2)(batch())
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
def test_context_variables_reach_workers_and_recomputations(workers):
    """Those of the forward pass, as the other modes; among them the settings of torch.compile."""
    pipe = on_cpu(nn.Sequential(Settings(), Settings()), [1, 1], chunks=4, checkpoint="always", workers=workers)
    before = setting.set("of the caller")
    with compiler.patch(donated_buffer=False):
        output = pipe(batch())
    setting.reset(before)
    output.sum().backward()
    for layer in pipe:
        assert layer.first == layer.again == {("of the caller", False)}


def test_a_setting_of_a_layer_is_its_own():
    class Sets(Settings):
        def forward(self, x):
            setting.set("of a layer")
            return super().forward(x)

    pipe = on_cpu(nn.Sequential(Sets(), Settings()), [1, 1], chunks=4, checkpoint="always", workers="always")
    pipe(batch()).sum().backward()
    assert setting.get() == "of nobody"
