"""Pipe in a training program: what programs do with a model, and what the pipelines before it could not take."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_

from gpipe_bench import LocalValue, NoChunk, Pipe
from tests.engine.steps import samples

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


# --- inputs -------------------------------------------------------------------------------------------------


class First(nn.Module):
    """Two inputs that are split, and others that are not."""

    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(7, 4), nn.Linear(4, 4)

    def forward(self, tokens, x, weights, adjacency, *, scale, mask=None, name=""):
        assert (weights.shape, name) == ((4,), "a")
        x = torch.tanh(self.linear(x)) * weights * scale + self.table(tokens)
        return torch.sparse.mm(adjacency, x.t()).t(), weights, mask, True


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, weights, mask, flag):
        assert flag is True
        return self.linear(x) * weights * mask


def loss_of_rows(output, target):
    return ((output.local_value() if isinstance(output, LocalValue) else output).sin().sum(1) * target).mean()


@pytest.mark.parametrize(
    ("schedule", "called"),
    [(None, True), (None, False), ("gpipe", True), ("gpipe", False), ("1f1b", False), ("zb_v", False)],
)
@CHECKPOINTS
def test_inputs_of_all_kinds(checkpoint, schedule, called):
    """Whole ones get the sum of the gradients of all micro-batches."""
    torch.manual_seed(0)
    layers = nn.Sequential(First(), Second(), nn.Linear(4, 4), nn.Tanh()).double()
    plain, target, found = copy.deepcopy(layers), torch.linspace(-1, 1, 7).double(), []
    pipe = Pipe(layers, 3, checkpoint, balance=[1] * 4, schedule=schedule)
    for model, whole in ((pipe, NoChunk), (plain, lambda value: value)):
        leaves = [samples(7, 4), samples(4), samples(7, 1)]
        inputs = (
            torch.tensor([0, 5, 3, 6, 1, 4, 2]),
            leaves[0],
            whole(leaves[1]),
            whole(torch.eye(4).double().to_sparse()),
        )
        named = {"scale": leaves[2], "mask": whole(torch.tensor([1.0, 0, 2, 1]).double()), "name": "a"}
        if model is plain:
            loss = loss_of_rows(plain[2:](plain[1](*plain[0](*inputs, **named))), target)
            loss.backward()
        elif called:
            loss = loss_of_rows(pipe(*inputs, **named), target)
            loss.backward()
        else:
            loss = pipe.step(inputs, target, loss_of_rows, **named)
        found.append([loss.detach(), *(each.grad for each in (*leaves, *model.parameters()))])
    torch.testing.assert_close(*found)


class Add(nn.Module):
    def forward(self, x, y):
        return x + 2 * y


def test_inputs_of_a_step_by_position_and_by_name():
    pipe = Pipe(nn.Sequential(Add(), nn.Linear(4, 4)), 3, balance=[1, 1], schedule="1f1b")
    losses = [
        pipe.step((X, X + 1), X, mse_loss),
        pipe.step(X, X, mse_loss, y=X + 1),
        pipe.step((), X, mse_loss, x=X, y=X + 1),
    ]
    assert losses == losses[:1] * 3


# --- modes -------------------------------------------------------------------------------------------------


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


# --- what belongs to a training program -----------------------------------------------------------------------------


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
