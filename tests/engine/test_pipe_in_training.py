"""Pipe in a training program: what programs do with a model, and what the pipelines before it could not take."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize

from gpipe_bench import NoChunk, Pipe
from gpipe_bench.skip import pop, skippable, stash

CHECKPOINTS = pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))


def pipe_of(module: nn.Sequential, checkpoint: str = "always", **options) -> Pipe:
    """A pipeline with a copy of every layer, three micro-batches, two partitions or as told."""
    half = len(module) // 2
    options = {"chunks": 3, "balance": [half, len(module) - half], **options}
    return Pipe(copy.deepcopy(module), checkpoint=checkpoint, **options)


def loss_of(model: nn.Module, *inputs, **kwargs) -> torch.Tensor:
    output = model(*inputs, **kwargs)
    output = output.local_value() if isinstance(model, Pipe) else output
    return output.float().square().sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_step(plain: nn.Module, pipe: Pipe, *inputs, **kwargs) -> None:
    for model in (plain, pipe):
        loss_of(model, *inputs, **kwargs).backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))


# --- values ----------------------------------------------------------------------------------------------------------


class Emit(nn.Module):
    """x -> (None, True, "word", linear(x), an integer tensor)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return None, True, "word", self.linear(x), torch.arange(len(x))


class Absorb(nn.Module):
    def forward(self, nothing, flag, word, x, numbers):
        assert nothing is None
        assert flag is True
        assert word == "word"
        assert numbers.dtype == torch.int64
        return x * (1 + numbers.unsqueeze(1))


@CHECKPOINTS
def test_none_bool_and_text_between_layers(checkpoint):
    plain = Pipe(nn.Sequential(Emit(), Absorb()), chunks=3, checkpoint="never")
    pipe = Pipe(copy.deepcopy(nn.Sequential(*plain)), chunks=3, checkpoint=checkpoint, balance=[1, 1])
    assert_same_step(plain, pipe, X)


class Embed(nn.Module):
    """(token numbers, weights) -> (token numbers, embedding)."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, tokens, weights):
        return tokens, self.table(tokens) * weights


class Drop(nn.Module):
    def forward(self, tokens, x):
        return x * (tokens > 2).unsqueeze(1)


@CHECKPOINTS
def test_an_integer_tensor_comes_first(checkpoint):
    tokens, weights = torch.tensor([0, 5, 3, 6, 1, 4]), X.abs()
    pipe = pipe_of(nn.Sequential(Embed(), Drop()), checkpoint)
    plain = copy.deepcopy(nn.Sequential(*pipe))
    plain[1](*plain[0](tokens, weights)).square().sum().backward()
    loss_of(pipe, tokens, weights).backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))
    assert pipe[0].table.weight.grad.abs().sum() > 0


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, *, scale=1.0, mask=None, name=""):
        y = self.linear(x) * scale
        return y if mask is None else y * mask


@CHECKPOINTS
def test_inputs_by_keyword(checkpoint):
    plain = nn.Sequential(Scaled(), nn.Linear(4, 4))
    pipe = pipe_of(plain, checkpoint)
    mask, scale = torch.tensor([1.0, 0.0, 2.0, 1.0]), X[:, :1]
    plain[1](plain[0](X, scale=scale, mask=mask)).square().sum().backward()
    loss_of(pipe, X, scale=scale, mask=NoChunk(mask), name="a").backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))


@CHECKPOINTS
def test_a_tensor_for_every_microbatch_gets_the_sum_of_their_gradients(checkpoint):
    plain = nn.Sequential(Scaled(), nn.Linear(4, 4))
    pipe = pipe_of(plain, checkpoint)
    masks = [torch.tensor([1.0, 0.5, 2.0, 1.0], requires_grad=True) for _ in range(2)]
    plain[1](plain[0](X, mask=masks[0])).square().sum().backward()
    loss_of(pipe, X, mask=NoChunk(masks[1])).backward()
    torch.testing.assert_close(masks[1].grad, masks[0].grad)
    torch.testing.assert_close(gradients(pipe), gradients(plain))


@skippable(stash=["aside"])
class Aside(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        yield stash("aside", self.linear(x))
        return x


@skippable(pop=["aside"])
class Unused(nn.Module):
    def forward(self, x):
        aside = yield pop("aside")
        assert aside.shape == x.shape
        return x


@CHECKPOINTS
def test_a_popped_skip_that_gets_no_gradient(checkpoint):
    plain = nn.Sequential(nn.Linear(4, 4), Aside(), nn.Linear(4, 4), Unused(), nn.Linear(4, 4))
    pipe = pipe_of(plain, checkpoint, balance=[2, 1, 2])
    for model in (plain, pipe):
        loss_of(model, X).backward()
    found = gradients(pipe)
    for name, expected in gradients(plain).items():
        missing = torch.zeros_like(plain.get_parameter(name))
        torch.testing.assert_close(
            missing if found[name] is None else found[name], missing if expected is None else expected
        )


# --- modes -----------------------------------------------------------------------------------------------------------


@CHECKPOINTS
def test_autocast_reaches_every_layer(checkpoint):
    plain = network()
    pipe = pipe_of(plain, checkpoint)
    seen = []
    for layer in pipe:
        layer.register_forward_hook(lambda _layer, _args, output: seen.append(output.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(pipe, X)
        expected = sum(loss_of(plain, part) for part in X.chunk(3))
    loss.backward()
    expected.backward()
    assert set(seen) == {torch.bfloat16}
    torch.testing.assert_close(gradients(pipe), gradients(plain), rtol=0.05, atol=0.05)


def test_inference_mode_reaches_the_workers():
    pipe = pipe_of(network())
    with torch.inference_mode():
        output = pipe(X).local_value()
    assert output.is_inference()
    torch.testing.assert_close(output.clone(), network()(X))
    loss_of(pipe, X).backward()


@CHECKPOINTS
def test_training_and_evaluation_in_any_order(checkpoint):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 4))
    # Recomputations would count the batch in the running statistics once more.
    pipe = pipe_of(plain, checkpoint, chunks=1, deferred_batch_norm=True)
    for training in (False, True, True, False, True, False, False):
        plain.train(training)
        pipe.train(training)
        outputs = []
        for model in (plain, pipe):
            torch.manual_seed(1)
            model.zero_grad()
            result = model(X)
            outputs.append(result if model is plain else result.local_value())
            outputs[-1].square().sum().backward()
        torch.testing.assert_close(outputs[1], outputs[0])
        torch.testing.assert_close(gradients(pipe), gradients(plain))
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


def test_batch_statistics_after_checkpointed_batches_with_deferral():
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    pipe = pipe_of(plain, "always", deferred_batch_norm=True)
    for _ in range(3):
        plain(X)
        loss_of(pipe, X).backward()
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


# --- what belongs to a training program ------------------------------------------------------------------------------


def test_a_plain_state_dict_goes_in_and_comes_out():
    plain, pipe = network(), pipe_of(network())
    pipe.load_state_dict({name: 2 * tensor for name, tensor in plain.state_dict().items()})
    plain.load_state_dict(pipe.state_dict())
    torch.testing.assert_close(pipe(X).local_value(), plain(X))


@CHECKPOINTS
def test_gradients_accumulate_over_batches(checkpoint):
    plain, pipe = network(), pipe_of(network(), checkpoint)
    for scale in (1, -2, 0.5):
        assert_same_step(plain, pipe, scale * X)
    losses = sum(loss_of(plain, scale * X) for scale in (3, 4))
    losses.backward()
    # Two batches under way before the backward pass.
    sum(loss_of(pipe, scale * X) for scale in (3, 4)).backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))


OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.05, momentum=0.9, weight_decay=0.1),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.01),
    "groups": lambda parameters: torch.optim.SGD([{"params": list(parameters), "lr": 0.1}], 0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_scheduler_and_clipping_see_ordinary_parameters(name):
    plain, pipe = network(), pipe_of(network())
    models = {model: OPTIMIZERS[name](model.parameters()) for model in (plain, pipe)}
    norms = {model: [] for model in models}
    for model, optimizer in models.items():
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(model, X).backward()
            norms[model].append(clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            scheduler.step()
    torch.testing.assert_close(norms[pipe], norms[plain])
    torch.testing.assert_close(dict(pipe.named_parameters()), dict(plain.named_parameters()))
    state = copy.deepcopy(models[pipe].state_dict())
    models[plain].load_state_dict(state)


@CHECKPOINTS
def test_frozen_layers_get_no_gradient(checkpoint):
    plain = network()
    plain[0].requires_grad_(False)
    plain[4].bias.requires_grad_(False)
    pipe = pipe_of(plain, checkpoint)
    assert_same_step(plain, pipe, X)
    assert pipe[0].weight.grad is None
    plain[2].requires_grad_(False)
    pipe[2].requires_grad_(False)
    for model in (plain, pipe):
        model.zero_grad()
    assert_same_step(plain, pipe, X)


@CHECKPOINTS
def test_nothing_to_train_in_the_first_partition_but_the_input(checkpoint):
    plain = network()
    plain[0].requires_grad_(False)
    pipe = pipe_of(plain, checkpoint)
    leaves = [X.clone().requires_grad_() for _ in range(2)]
    for model, leaf in zip((plain, pipe), leaves, strict=True):
        loss_of(model, leaf).backward()
    torch.testing.assert_close(leaves[1].grad, leaves[0].grad)


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).mT


@CHECKPOINTS
def test_parametrized_weights(checkpoint):
    plain = network()
    parametrize.register_parametrization(plain[2], "weight", Symmetric())
    parametrizations.weight_norm(plain[0])
    pipe = pipe_of(plain, checkpoint)
    assert_same_step(plain, pipe, X)
    with parametrize.cached():
        if checkpoint == "never":
            torch.testing.assert_close(pipe(X).local_value(), plain(X))
        else:  # one weight, made without a graph, would serve all tasks
            with pytest.raises(RuntimeError, match=r"got parametrize.cached\(\) around a batch with checkpoints"):
                pipe(X)


@CHECKPOINTS
def test_hooks_of_layers_parameters_and_gradients(checkpoint):
    def negate(weight):
        weight.grad.neg_()

    plain, pipe = network(), pipe_of(network(), checkpoint)
    for model in (plain, pipe):
        model[0].register_forward_pre_hook(lambda _layer, args: (args[0] * 2,))
        model[2].register_forward_hook(lambda _layer, _args, output: output + 1)
        model[4].register_full_backward_hook(lambda _layer, given, _gave: (given[0] * 3,))
        model[2].weight.register_hook(lambda gradient: gradient / 2)
        model[0].weight.register_post_accumulate_grad_hook(negate)
    # The last one acts on the sum of all micro-batches only if there is one.
    pipe.chunks = 1
    assert_same_step(plain, pipe, X)


class Block(nn.Module):
    """PyTorch compiles no layers of its own by themselves."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(torch.tanh(self.linear(x)))


# The compiler hides this warning by a switch that all threads share.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@CHECKPOINTS
def test_compiled_layers(checkpoint):
    runs = []

    def backend(graph, _inputs):
        return lambda *args: runs.append(graph) or graph(*args)

    torch.compiler.reset()
    torch.manual_seed(0)
    plain = nn.Sequential(Block(), Block())
    pipe = pipe_of(plain, checkpoint)
    for layer in pipe:
        # In place: torch.compile(layer) is a wrapper, which calls every parameter by another name.
        layer.compile(backend=backend)
    passes = 6 + {"always": 6, "except_last": 4, "never": 0}[checkpoint]
    for _ in range(2):
        assert_same_step(plain, pipe, X)
        assert len(runs) == passes
        runs.clear()
    wrapped = Pipe(nn.Sequential(*(torch.compile(layer, backend=backend) for layer in plain)), 3, checkpoint)
    torch.testing.assert_close(wrapped(X).local_value(), plain(X))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_layer_is_recomputed_with_the_same_dropout_mask():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return nn.functional.dropout(x * self.factor, 0.5)

    torch.compiler.reset()
    pipe = Pipe(nn.Sequential(Scale(), Scale()), 3, "always", balance=[1, 1])
    for layer in pipe:
        layer.compile(backend="aot_eager")
    for _ in range(3):
        pipe.zero_grad()
        total = pipe(X).local_value().sum()
        total.backward()
        # Linear in each factor, which is 1.
        torch.testing.assert_close([parameter.grad for parameter in pipe.parameters()], [total.detach()] * 2)
