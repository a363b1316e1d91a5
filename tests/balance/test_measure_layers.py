"""Layers that are measured on this machine: their sizes, the model that stays as it was, and a prediction from them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gpipe_bench.balance import measure_layers
from gpipe_bench.simulator import read_layers, simulate, write_layers

MIB = 2**20


class Shift(nn.Module):
    """Nothing is kept: its output is only what the next layer gets."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.zeros(1), requires_grad=False)

    def forward(self, x):
        return x + self.by


class Twice(nn.Module):
    """Two tensors out."""

    def forward(self, x):
        return x, 2 * x


class Join(nn.Module):
    def forward(self, both):
        return both[0] * both[1]


class Recomputed(nn.Module):
    def __init__(self, width) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))

    def forward(self, x):
        return checkpoint(self.inside, x, use_reentrant=False)


def columns(layers, *names):
    return [tuple(round(getattr(layer, name) * MIB) for name in names) for layer in layers]


X = 8 * 16 * 4
"""Bytes of eight samples of width 16."""


@pytest.mark.parametrize(
    ("modules", "sizes"),
    [
        # ReLU keeps its result, which the next layer keeps as well; the last output is kept by the loss.
        ([nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)], [(0, X), (X, X), (X, X)]),
        # Tanh keeps its result, Linear its input: one tensor, which counts once.
        ([nn.Tanh(), nn.Linear(16, 16), nn.Tanh()], [(X, X), (0, X), (X, X)]),
        # What Shift gives is kept by Linear.
        ([nn.Linear(16, 16), Shift(), nn.Linear(16, 16)], [(0, X), (X, X), (X, X)]),
        ([nn.Linear(16, 32), Twice(), Join()], [(2 * X, 2 * X), (2 * X, 4 * X), (2 * X, 2 * X)]),
        ([Recomputed(16), Recomputed(16)], [(X, X), (X, X)]),
    ],
    ids=["relu", "tanh", "shift", "tuples", "checkpoint"],
)
def test_what_stays_until_the_backward_pass_counts_once(modules, sizes):
    x = torch.rand(8, 16, requires_grad=True)
    measured = measure_layers(nn.Sequential(*modules), x, timeout=0)
    assert columns(measured, "activation_mib", "output_mib") == sizes
    assert {layer.samples for layer in measured} == {8}


def test_parameters_and_buffers():
    frozen = nn.Linear(16, 16)
    frozen.weight.requires_grad_(requires_grad=False)
    modules = [nn.Linear(16, 4), nn.BatchNorm1d(4), nn.Linear(4, 16, dtype=torch.float32), frozen, nn.ReLU()]
    measured = measure_layers(nn.Sequential(*modules), torch.rand(8, 16), timeout=0)
    assert columns(measured, "parameter_mib", "buffer_mib") == [
        (4 * (16 * 4 + 4), 0),
        (4 * (4 + 4), 4 * (4 + 4) + 8),
        (4 * (4 * 16 + 16), 0),
        (4 * 16, 4 * 16 * 16),
        (0, 0),
    ]
    assert [layer.parameters for layer in measured] == [2, 2, 2, 1, 0]
    assert [layer.name for layer in measured] == ["Linear", "BatchNorm1d", "Linear", "Linear", "ReLU"]


def test_the_model_stays_as_it_was():
    class Noisy(nn.Module):
        """Draws random numbers, writes to a buffer, and to its input."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(16))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x):
            self.count += 1
            return x.add_(1) * self.weight + torch.rand(16)

    model = nn.Sequential(nn.Linear(16, 16), Noisy(), nn.Dropout(), nn.BatchNorm1d(16), nn.ReLU(inplace=True)).eval()
    model[0].weight.grad = torch.ones(16, 16)
    x = torch.rand(8, 16)
    before, sample, state = copy.deepcopy(model), x.clone(), torch.get_rng_state()
    measure_layers(model, x, timeout=0)
    assert torch.equal(x, sample)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module.training for module in model.modules())
    for (name, one), other in zip(before.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(one, other), name
    assert torch.equal(model[0].weight.grad, torch.ones(16, 16))
    assert model[1].weight.grad is None


@pytest.mark.parametrize("schedule", [None, "1f1b", "zb_h1", "zb_v"])
def test_from_a_network_on_this_machine_to_its_step_on_several_devices(tmp_path, schedule):
    blocks = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(50, 16), *blocks, nn.Linear(16, 50))
    tokens = torch.randint(50, (4, 6))
    layers = measure_layers(model, tokens, timeout=0)
    path = tmp_path / "times.csv"
    write_layers(path, layers)
    assert read_layers(path) == tuple(layers)
    how = {"batch_size": 32, "chunks": 8, "schedule": schedule, "profile": "h100", "optimizer": "adamw"}
    step = simulate(read_layers(path), balance=[2, 1, 1, 1], **how)
    assert (step.status, step.caveats) == ("ok", ())
    slowest = max(layer.forward_ms + layer.backward_ms for layer in layers)
    everything = sum(2 * layer.forward_ms + layer.backward_ms for layer in layers)
    assert 8 * slowest <= step.step_time_ms <= 8 * everything + 5
    trained = sum(parameter.nbytes for parameter in model.parameters())
    assert step.peak_allocated_gib * 2**30 >= 4 * trained


def test_a_tuple_of_inputs():
    class Add(nn.Module):
        def forward(self, x, y):
            return x + y

    measured = measure_layers(nn.Sequential(Add(), nn.Linear(4, 4)), (torch.rand(3, 4), torch.rand(3, 4)), timeout=0)
    assert [(layer.samples, round(layer.output_mib * MIB)) for layer in measured] == [(3, 48), (3, 48)]
