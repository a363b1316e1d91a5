"""The table "What differs in micro-batches" of docs/training.md: what it says, and that its advice helps."""

from __future__ import annotations

import copy
import random
from contextvars import ContextVar

import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, disable_observer
from torch.nn.functional import mse_loss
from torch.nn.utils.parametrizations import spectral_norm

from gpipe_bench import is_recomputing
from tests.engine.support import Do, on_cpu

M = 4


def pipe_of(*layers, **options):
    return on_cpu(nn.Sequential(*layers), [1] * len(layers), chunks=M, **options)


def rows(*shape):
    return torch.rand(8, *shape, dtype=torch.float64)


@pytest.mark.parametrize(("checkpoint", "iterations"), [("never", M), ("always", 2 * M)])
def test_spectral_norm_iterates_once_per_microbatch_and_recomputation(checkpoint, iterations):
    plain = spectral_norm(nn.Linear(4, 4)).double()
    pipe = pipe_of(copy.deepcopy(plain), checkpoint=checkpoint)
    pipe(rows(4)).sum().backward()
    for _ in range(iterations):
        plain(rows(4))
    torch.testing.assert_close(dict(pipe[0].named_buffers()), dict(plain.named_buffers()))


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_spectral_norm_that_iterates_before_the_batch_is_the_plain_one(schedule):
    plain = nn.Sequential(spectral_norm(nn.Linear(4, 4)), nn.Tanh()).double()
    pipe = pipe_of(*copy.deepcopy(plain), checkpoint="always", schedule=schedule)
    for _ in range(2):
        x, y = rows(4), rows(4)
        plain.zero_grad()
        pipe.zero_grad()
        pipe[0].train()
        _ = pipe[0].weight
        pipe[0].eval()
        pipe.step(x, y, mse_loss)
        mse_loss(plain(x), y).backward()
    grads = [[weight.grad for weight in model.parameters()] for model in (pipe, plain)]
    torch.testing.assert_close(*grads)
    torch.testing.assert_close(dict(pipe.named_buffers()), dict(plain.named_buffers()))


class Observed(nn.Module):
    def __init__(self):
        super().__init__()
        self.quantize, self.linear = FakeQuantize(), nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(self.quantize(x))


def test_observers_that_are_off_leave_their_range():
    layer = Observed()
    layer(torch.ones(8, 4))
    pipe = pipe_of(layer, checkpoint="always")
    pipe.apply(disable_observer)
    pipe(torch.full((8, 4), 9.0)).sum().backward()
    assert float(layer.quantize.activation_post_process.max_val) == 1


class Counter(nn.Module):
    def __init__(self, *, asks):
        super().__init__()
        self.linear, self.asks, self.count = nn.Linear(4, 4).double(), asks, 0

    def forward(self, x):
        self.count += not (self.asks and is_recomputing())
        return self.linear(x)


@pytest.mark.parametrize(("asks", "count"), [(False, 2 * M), (True, M)])
def test_a_counter_that_asks_leaves_the_recomputation_out(asks, count):
    pipe = pipe_of(Counter(asks=asks), checkpoint="always")
    pipe(rows(4)).sum().backward()
    assert pipe[0].count == count


class LayerDrop(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.linear, self.draw, self.paths = nn.Linear(4, 4).double(), draw, {False: [], True: []}

    def forward(self, x):
        drops = self.draw() < 0.5
        # what tells micro-batches apart
        self.paths[is_recomputing()].append((float(x.detach().sum()), drops))
        return x if drops else self.linear(x)


@pytest.mark.parametrize(("draw", "same"), [(random.random, False), (lambda: float(torch.rand(())), True)])
def test_layer_drop_takes_the_same_path_with_random_numbers_of_torch(draw, same):
    random.seed(0)
    pipe = pipe_of(LayerDrop(draw), nn.Linear(4, 4).double(), checkpoint="always")
    pipe(rows(4).requires_grad_()).sum().backward()
    first, again = (sorted(pipe[0].paths[key]) for key in (False, True))
    assert (first == again) is same


class Picked(nn.Module):
    """The output of a recurrent layer that takes (T, N, C), for a batch (N, T, C)."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x.transpose(0, 1))[0].transpose(0, 1)


def test_a_time_major_layer_is_right_behind_a_transpose():
    layer, x = nn.LSTM(4, 3).double(), rows(5, 4)
    torch.testing.assert_close(pipe_of(Picked(layer))(x), Picked(layer)(x))


def test_the_state_of_a_last_lstm_is_concatenated_along_its_layers():
    h, _ = pipe_of(nn.LSTM(4, 3, 2, batch_first=True).double())(rows(5, 4))[1]
    assert h.shape == (2 * M, 8 // M, 3)


class State(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 3, 2, batch_first=True).double()

    def forward(self, x):
        return self.lstm(x)[1][0].transpose(0, 1)


def test_a_state_with_the_batch_first_is_that_of_the_plain_layer():
    layer, x = State(), rows(5, 4)
    torch.testing.assert_close(pipe_of(layer)(x), layer(x))


@pytest.mark.parametrize(
    ("checkpoint", "schedule", "steps"), [("never", None, 1), ("always", None, M), ("never", "1f1b", M)]
)
def test_an_optimizer_in_a_hook_steps_once_per_microbatch(checkpoint, schedule, steps):
    layer, seen = nn.Linear(4, 4).double(), []
    layer.weight.register_post_accumulate_grad_hook(seen.append)
    pipe_of(layer, checkpoint=checkpoint, schedule=schedule).step(rows(4), rows(4), mse_loss)
    assert len(seen) == steps


NUMBER = ContextVar("NUMBER", default=0)


def sets(x):
    NUMBER.set(1)
    return x


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(NUMBER.get())
        return x


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_context_variable_that_a_layer_sets_is_not_seen_in_later_partitions(schedule):
    layers = nn.Sequential(Do(sets), Reads()), Reads()
    pipe_of(*layers, schedule=schedule, checkpoint="never", workers="always").step(
        rows(4).requires_grad_(), rows(4), mse_loss
    )
    assert (layers[0][1].seen, layers[1].seen) == ([1] * M, [0] * M)
