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
    Affine,
    InPlace,
    Mix,
    assert_same,
    on_cpu,
    on_floats,
    score,
    skip_pair,
    train_step,
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


def test_second_derivatives_through_a_checkpoint_are_refused():
    pipe = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=2, checkpoint="always")
    x = ones(2).requires_grad_()
    with pytest.raises(RuntimeError, match="checkpoint='never'"):
        torch.autograd.grad(score(pipe(x)), x, create_graph=True)


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


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_that_nobody_uses_counts_as_zero(checkpoint, used):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Mix(), Mix()

        def forward(self, x):
            return self.one(x), self.other(x)

    plain = nn.Sequential(Mix(), Two()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=3, checkpoint=checkpoint)
    x = ones(6).double()
    found, expected = (train_step(model, x, lambda output: score(output[used])) for model in (pipe, plain))
    assert_same(found, expected)
    # and parameters that have nothing to do with the loss have no gradient, rather than zeros
    missing = [name for name, gradient in expected.gradients.items() if gradient is None]
    assert missing
    assert [name for name, gradient in found.gradients.items() if gradient is None] == missing


@pytest.mark.parametrize("checkpoint", MODES)
def test_several_forward_passes_before_their_backward_passes(checkpoint):
    plain = nn.Sequential(Mix(), Mix()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint=checkpoint)
    for model in (plain, pipe):
        losses = [score(model(ones(4).double() * factor)) for factor in (1, 2)]
        losses[1].backward()
        losses[0].backward()
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


def test_gradients_accumulate_over_steps():
    plain = nn.Sequential(Mix(), Mix()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=2)
    for model in (plain, pipe):
        for factor in (1, 2, 3):
            score(model(ones(4).double() * factor)).backward()
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("checkpoint", MODES)
def test_an_autograd_function_that_returns_its_input_works_in_any_place(checkpoint):
    class Same(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    class Double(nn.Module):
        def forward(self, x):
            return on_floats(Same.apply, x)

    plain = nn.Sequential(Double(), Mix(), Double(), Double(), Mix(), Double()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 2, 1, 2], chunks=2, checkpoint=checkpoint, transfer="host")
    x = ones(4).double().requires_grad_()
    assert_same(train_step(pipe, x), train_step(plain, x))


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("make", [nn.Identity, nn.Flatten, lambda: nn.Unflatten(1, (WIDTH, 1))])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_partition_may_give_its_input_or_a_view_of_it(checkpoint, make, transfer):
    """As its output, from which the next layer goes on in place."""
    plain = nn.Sequential(Affine(), make(), InPlace(), nn.Flatten(), Affine()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1, 1, 2], chunks=2, checkpoint=checkpoint, transfer=transfer)
    for _ in range(2):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, WIDTH).requires_grad_()
        assert_same(train_step(pipe, x), train_step(plain, x))


def test_a_skip_taken_as_it_is_by_a_checkpoint_keeps_its_gradient():
    opening, closing = skip_pair()
    plain = nn.Sequential(Mix(), opening, Mix(), closing).double()
    pipe = on_cpu(copy.deepcopy(plain), [2, 1, 1], chunks=2, checkpoint="always")
    x = ones(4).double().requires_grad_()
    assert_same(train_step(pipe, x), train_step(plain, x))
