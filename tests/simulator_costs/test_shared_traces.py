"""Models of one family trace a kind of layer once, but only layers that nothing tells apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.simulator.tracing import model_trace
from gpipe_bench.simulator.tracing.model_trace import Tracer
from gpipe_bench.simulator.tracing.signature import is_lasting, signature

BATCH, CHANNELS = 4, 8


class Scaled(nn.Module):
    """Multiplies by what an object says that has no plain form."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return x * self.scale.value


class Scale:
    value = 2.0


def tracer(*layers):
    return Tracer(nn.Sequential(*layers), torch.empty(1, CHANNELS, device="meta"))


@pytest.fixture
def traced(monkeypatch):
    """The layers that are traced from now on."""
    found, real = [], model_trace.trace_layer

    def trace_layer(layer, *arguments):
        found.append(type(layer))
        return real(layer, *arguments)

    monkeypatch.setattr(model_trace, "_runs", {})
    monkeypatch.setattr(model_trace, "trace_layer", trace_layer)
    return found


def test_another_model_of_the_same_layers_is_not_traced_again(traced):
    first = tracer(nn.Linear(CHANNELS, CHANNELS), nn.ReLU()).trace(BATCH)
    assert len(traced) == 2
    second = tracer(nn.Linear(CHANNELS, CHANNELS), nn.ReLU(), nn.ReLU()).trace(BATCH)
    assert second.kinds[: len(first.kinds)] == first.kinds
    assert len(traced) == 2


def test_layers_that_count_by_identity_are_traced_for_each_model(traced):
    for _ in range(2):
        tracer(Scaled(Scale())).trace(BATCH)
    assert traced == [Scaled, Scaled]


@pytest.mark.parametrize(("layer", "lasts"), [(nn.Linear(2, 2), True), (Scaled(Scale()), False)])
def test_whether_a_signature_lasts(layer, lasts):
    assert is_lasting(signature(layer)) is lasts
    assert is_lasting(signature(nn.Sequential(nn.Sequential(layer)))) is lasts
