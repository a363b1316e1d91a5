"""What a caller may ask of autograd, and what layers may do to it, with and without checkpoints."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components
from tests.engine.support import (
    MODES,
    WIDTH,
    Mix,
    on_cpu,
    score,
)


def ones(size: int) -> Tensor:
    return torch.ones(size, WIDTH)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("early_recompute", [True, False])
def test_a_retained_graph_runs_backward_twice(checkpoint, early_recompute):
    components = Components(early_recompute=early_recompute)
    pipe = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=3, checkpoint=checkpoint, components=components)
    loss = score(pipe(ones(6)))
    loss.backward(retain_graph=True)
    once = [parameter.grad.clone() for parameter in pipe.parameters()]
    loss.backward()
    torch.testing.assert_close([parameter.grad for parameter in pipe.parameters()], [grad * 2 for grad in once])


def test_a_freed_graph_does_not_run_again():
    pipe = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=2, checkpoint="always")
    loss = score(pipe(ones(4)))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


# PyTorch's own warning on create_graph: the reference cycle that it makes is broken by zero_grad.
@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("early_recompute", [True, False])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_second_derivatives_of_parameters_are_refused(checkpoint, early_recompute):
    components = Components(early_recompute=early_recompute)
    pipe = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=2, checkpoint=checkpoint, components=components)
    with pytest.raises(RuntimeError, match="checkpoint='never'"):
        score(pipe(ones(2))).backward(create_graph=True)
    pipe.zero_grad()


def test_second_derivatives_without_checkpoints_are_those_of_the_plain_module():
    plain = nn.Sequential(Mix(), Mix()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint="never")

    def penalty(model):
        x = ones(2).double().requires_grad_()
        (grad,) = torch.autograd.grad(score(model(x)), x, create_graph=True)
        grad.pow(2).sum().backward()
        return x.grad

    torch.testing.assert_close(penalty(pipe), penalty(plain))


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_gradients_of_chosen_tensors_only_are_refused_through_a_checkpoint(checkpoint):
    """Gradients of parameters would be missing, or added to .grad though nobody asked."""
    pipe = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=2, checkpoint=checkpoint)
    x = ones(4).requires_grad_()
    for ask in (
        lambda: torch.autograd.grad(score(pipe(x)), x),
        lambda: torch.autograd.grad(score(pipe(x)), [x, *pipe.parameters()]),
        lambda: score(pipe(x)).backward(inputs=[x]),
    ):
        with pytest.raises(RuntimeError, match=r"must go to all parameters, got autograd.grad\(\).*checkpoint='never'"):
            ask()
    assert all(parameter.grad is None for parameter in pipe.parameters())


def test_gradients_of_chosen_tensors_only_are_given_without_checkpoints():
    plain = nn.Sequential(Mix(), Mix()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint="never")

    def ask(model):
        x = ones(4).double().requires_grad_()
        return torch.autograd.grad(score(model(x)), [x, *model.parameters()])

    torch.testing.assert_close(ask(pipe), ask(plain))


@pytest.mark.parametrize("checkpoint", MODES)
def test_losses_of_parts_of_the_output_add_up(checkpoint):
    plain = nn.Sequential(Mix(), Mix()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=3, checkpoint=checkpoint)
    x = ones(6).double()
    output = pipe(x)
    output[:2].sum().backward(retain_graph=True)
    output[4:].sin().sum().backward()
    expected = plain(x)
    (expected[:2].sum() + expected[4:].sin().sum()).backward()
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])
