"""Checkpointing: what runs twice, what layers are told, and what autograd may still be asked for."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components, is_checkpointing, is_recomputing
from tests.engine.support import (
    MODES,
    WIDTH,
    Affine,
    Flags,
    InPlace,
    Mix,
    assert_same,
    on_cpu,
    on_floats,
    score,
    skip_pair,
    train_step,
)

PLAIN, FIRST, AGAIN = (False, False), (True, False), (False, True)


def ones(size: int) -> Tensor:
    return torch.ones(size, WIDTH)


def flags_of_a_step(size=4, chunks=4, *, train=True, **options) -> list[tuple[bool, bool]]:
    layer = Flags()
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=chunks, **options).train(train)
    pipe(ones(size)).sum().backward()
    return layer.seen


@pytest.mark.parametrize(
    ("checkpoint", "forward", "backward"),
    [
        ("always", [FIRST] * 4, [AGAIN] * 4),
        ("except_last", [FIRST] * 3 + [PLAIN], [AGAIN] * 3),
        ("never", [PLAIN] * 4, []),
    ],
)
@pytest.mark.parametrize("early_recompute", [True, False])
def test_what_layers_are_told_and_how_often_they_run(checkpoint, forward, backward, early_recompute):
    components = Components(early_recompute=early_recompute)
    assert flags_of_a_step(checkpoint=checkpoint, components=components) == forward + backward


@pytest.mark.parametrize(("size", "chunks", "microbatches"), [(2, 8, 2), (5, 4, 3), (1, 4, 1)])
def test_the_last_microbatch_is_the_last_actual_one(size, chunks, microbatches):
    seen = flags_of_a_step(size, chunks, checkpoint="except_last")
    assert seen == [FIRST] * (microbatches - 1) + [PLAIN] + [AGAIN] * (microbatches - 1)


def test_evaluation_checkpoints_nothing():
    assert flags_of_a_step(checkpoint="always", train=False) == [PLAIN] * 4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_checkpointed(mode):
    layer = Flags()
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=2, checkpoint="always")
    with mode():
        pipe(ones(2))
    assert layer.seen == [PLAIN] * 2


def test_mode_and_chunks_may_change_between_batches():
    layer = Flags()
    pipe = on_cpu(nn.Sequential(layer), [1], chunks=4, checkpoint="always")
    pipe.checkpoint, pipe.chunks = "never", 2
    pipe(ones(4))
    assert layer.seen == [PLAIN] * 2


def test_outside_a_pipeline_both_flags_are_off():
    assert (is_checkpointing(), is_recomputing()) == PLAIN


def test_flags_belong_to_a_thread():
    """While one partition runs its first pass, the calling thread and other workers are told nothing of it."""
    inside, asked = threading.Event(), threading.Event()
    elsewhere = []

    class Hold(nn.Module):
        def forward(self, x):
            inside.set()
            assert asked.wait(timeout=30)
            return x * torch.ones(1, requires_grad=True)

    def ask():
        inside.wait(timeout=30)
        elsewhere.append((is_checkpointing(), is_recomputing()))
        asked.set()

    thread = threading.Thread(target=ask)
    thread.start()
    on_cpu(nn.Sequential(Hold(), Mix()), [1, 1], chunks=2, checkpoint="always")(ones(2))
    thread.join()
    assert elsewhere == [PLAIN]


def test_flags_are_back_after_an_exception():
    class Fail(nn.Module):
        def forward(self, x):
            raise ValueError("as it must")

    pipe = on_cpu(nn.Sequential(Fail(), Flags()), [2], checkpoint="always")
    with pytest.raises(ValueError, match="as it must"):
        pipe(ones(1).requires_grad_())
    assert (is_checkpointing(), is_recomputing()) == PLAIN


def test_a_frozen_partition_without_gradients_to_pass_on_is_not_checkpointed():
    frozen, trained = Flags().requires_grad_(requires_grad=False), Flags()
    pipe = on_cpu(nn.Sequential(frozen, trained), [1, 1], chunks=2, checkpoint="always")
    pipe(ones(2)).sum().backward()
    assert frozen.seen == [PLAIN] * 2
    assert trained.seen == [FIRST] * 2 + [AGAIN] * 2


def test_a_frozen_partition_that_passes_gradients_on_is_checkpointed():
    trained, frozen = Flags(), Flags().requires_grad_(requires_grad=False)
    pipe = on_cpu(nn.Sequential(trained, frozen), [1, 1], chunks=2, checkpoint="always")
    pipe(ones(2)).sum().backward()
    assert frozen.seen == [FIRST] * 2 + [AGAIN] * 2
    assert trained.weight.grad == 2 * WIDTH


@pytest.mark.parametrize("fork_join", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
def test_parameters_get_gradients_when_no_input_needs_one(checkpoint, fork_join):
    pipe = on_cpu(
        nn.Sequential(nn.Embedding(5, WIDTH), Mix()), [1, 1],
        chunks=2, checkpoint=checkpoint, components=Components(fork_join=fork_join),
    )  # fmt: skip
    pipe(torch.arange(4)).sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in pipe.parameters())


@pytest.mark.parametrize("fork_join", [True, False])
def test_an_input_that_needs_no_gradient_gets_none_computed(fork_join):
    asked = []

    class Ask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            asked.append(x.requires_grad)
            return x * self.weight

    components = Components(fork_join=fork_join)
    pipe = on_cpu(nn.Sequential(Ask()), [1], chunks=3, checkpoint="always", components=components)
    pipe(ones(3)).sum().backward()
    assert asked == [False] * 6


def test_values_that_are_no_tensors_pass_between_layers():
    class Note(nn.Module):
        def forward(self, x):
            return x * 2, {"factor": 3}, None, "text"

    class Read(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = Mix()

        def forward(self, values):
            x, note, nothing, text = values
            assert (nothing, text) == (None, "text")
            return self.mix(x) * note["factor"]

    plain = nn.Sequential(Mix(), Note(), Read())
    for checkpoint in MODES:
        pipe = on_cpu(copy.deepcopy(plain), [1, 1, 1], chunks=2, checkpoint=checkpoint, transfer="host")
        assert_same(train_step(pipe, ones(4)), train_step(plain, ones(4)))


# --- in-place layers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_partition_may_begin_with_an_in_place_layer(checkpoint, transfer):
    plain = nn.Sequential(Affine(), InPlace(), Affine(), nn.ReLU(inplace=True), Affine())
    pipe = on_cpu(copy.deepcopy(plain), [1, 2, 2], chunks=3, checkpoint=checkpoint, transfer=transfer)
    for _ in range(2):
        assert_same(train_step(pipe, ones(6)), train_step(plain, ones(6)))


def test_a_checkpoint_leaves_the_callers_input_alone():
    x = ones(4)
    pipe = on_cpu(nn.Sequential(InPlace(), Affine()), [2], chunks=2, checkpoint="always")
    pipe(x).sum().backward()
    torch.testing.assert_close(x, ones(4))


def test_a_layer_that_begins_to_write_to_its_input_later_is_told_to_try_again():
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.affine = Affine()

        def forward(self, x):
            return self.affine(x.mul_(0.5) if x.max() > 10 else x * 0.5)

    plain = nn.Sequential(Affine(), Late())
    plain[0].linear.weight.data = torch.eye(WIDTH)
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint="always")
    pipe(ones(2)).sum().backward()
    hot = ones(2) * 100
    with pytest.raises(RuntimeError, match=r"partition 1 must write to their input from the first batch on or never"):
        pipe(hot)
    assert_same(train_step(pipe, hot), train_step(plain, hot))


# --- what autograd may be asked for ----------------------------------------------------------------------------------


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
