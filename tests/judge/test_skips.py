"""The same skips for everybody: adapters for other pipelines, stages that hand skips on."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from gpipe_bench.judge.skips import carried, make_stages, translated
from gpipe_bench.models.unet import unet


@pytest.fixture
def model():
    torch.manual_seed(0)
    return unet(2, 1, 4, dropout=0.0)


@pytest.fixture
def batch():
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(0))


def gradients(model, output):
    model.zero_grad()
    output.square().mean().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


def chained(stages, x):
    tensors = (x,)
    for stage in stages:
        given = stage(*tensors)
        tensors = given if isinstance(given, tuple) else (given,)
    return tensors


@pytest.mark.parametrize("balance", [[29], [14, 15], [5, 12, 12], [3, 2, 10, 7, 7]])
@pytest.mark.parametrize("sent", [False, True])
@pytest.mark.parametrize("recompute", [0, 1])
def test_stages_compute_what_the_model_computes(model, batch, balance, sent, recompute):
    wanted = model(batch)
    expected = gradients(model, wanted)
    stages = make_stages(model, balance, recompute, sent=sent)
    (output,) = chained(stages, batch)
    assert torch.equal(output, wanted)
    for found, one in zip(gradients(model, output), expected, strict=True):
        torch.testing.assert_close(found, one)


def test_skips_travel_from_their_stash_to_their_pop_only(model, batch):
    stages = make_stages(model, [5, 6, 11, 7])
    tensors = (batch,)
    widths = []
    for stage in stages:
        given = stage(*tensors)
        tensors = given if isinstance(given, tuple) else (given,)
        widths.append(len(tensors))
    assert widths == [2, 3, 2, 1]


def test_what_is_sent_is_contiguous_in_both_directions(model, batch):
    stages = make_stages(model, [12, 17], sent=True)
    given = stages[0](batch)
    assert all(tensor.is_contiguous() for tensor in given)
    arrived = [tensor.detach().requires_grad_() for tensor in given]
    assert all(gradient.is_contiguous() for gradient in torch.autograd.grad(stages[1](*arrived).sum(), arrived))


@pytest.mark.parametrize("recompute", [0, 1])
@pytest.mark.parametrize("balance", [[7, 7, 7, 8], [4, 4, 14, 7]])
def test_what_is_sent_can_be_detached_in_place(model, batch, balance, recompute):
    """The third stage ends in a view, and hands on a skip as it came; or the second one begins with a stash."""
    tensors = (batch,)
    for stage in make_stages(model, balance, recompute, sent=True):
        entered = tensors
        given = stage(*tensors)
        tensors = given if isinstance(given, tuple) else (given,)
        for tensor in tensors:
            tensor.detach_()
        assert all(tensor.requires_grad for tensor in entered if tensor is not batch)
        for tensor in tensors:
            tensor.requires_grad_()


def test_only_the_first_microbatches_are_checkpointed(batch):
    (stage,) = make_stages(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()), [2], recompute=1)
    names = [type(stage(batch).grad_fn).__name__ for _ in range(2)]
    runs = []
    stage.layers[0].register_forward_hook(lambda *_: runs.append(1))
    stage.calls = 0
    for _ in range(2):
        stage(batch).sum().backward()
    assert names == ["ReluBackward0"] * 2
    assert len(runs) == 3, "the first runs again in its backward pass, the second does not"


class Rival:
    """The skips of another package: a wrapper module that carries out what a layer yields."""

    class stash(NamedTuple):  # noqa: N801 - the name that it has there
        name: str
        tensor: torch.Tensor | None

    class pop(NamedTuple):  # noqa: N801 - likewise
        name: str

    def __init__(self):
        self.held = {}
        self.declared = []

    def skippable(self, stash, pop):
        self.declared.append((tuple(stash), tuple(pop)))

        def decorate(layer_class):
            rival = self

            class Wrapper(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.module = layer_class()

                def forward(self, x):
                    commands, answer = self.module(x), None
                    while True:
                        try:
                            command = commands.send(answer)
                        except StopIteration as stop:
                            return stop.value
                        answer = None
                        if isinstance(command, Rival.stash):
                            rival.held[command.name] = command.tensor
                        else:
                            answer = rival.held.pop(command.name)

            return Wrapper

        return decorate


def test_a_translated_model_speaks_the_language_of_the_rival(model, batch):
    wanted = model(batch)
    expected = gradients(model, wanted)
    rival = Rival()
    other = translated(model, rival)
    assert rival.declared == [(("skip0",), ()), (("skip1",), ()), ((), ("skip1",)), ((), ("skip0",))]
    output = other(batch)
    assert torch.equal(output, wanted)
    assert all(torch.equal(a, b) for a, b in zip(gradients(other, output), expected, strict=True))
    assert rival.held == {}


def test_a_model_without_skips_is_left_alone():
    model = nn.Sequential(nn.Linear(2, 2))
    assert translated(model, Rival()) is model


def test_a_carried_model_needs_no_skips(model, batch):
    wanted = model(batch)
    expected = gradients(model, wanted)
    other = carried(model)
    output = other(batch)
    assert torch.equal(output, wanted)
    assert all(torch.equal(a, b) for a, b in zip(gradients(other, output), expected, strict=True))


def test_a_carried_model_has_tuples_between_its_layers_while_skips_are_on_their_way(model, batch):
    x, widths = batch, []
    for layer in carried(model):
        x = layer(x)
        widths.append(len(x) if isinstance(x, tuple) else 1)
    assert max(widths) == 3
    assert widths[-1] == 1
