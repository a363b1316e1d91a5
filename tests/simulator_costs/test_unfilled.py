"""Models are made without values on the meta device, and are the same otherwise."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_bench.simulator.tracing.meta_layers import Unfilled
from gpipe_bench.simulator.tracing.signature import signature


def layers():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(5), nn.Linear(5, 6), nn.Embedding(8, 9))


def test_what_is_made_without_values_has_the_same_signature():
    with torch.device("meta"):
        usual = layers()
    with Unfilled():
        made = layers()
    assert [signature(layer) for layer in made] == [signature(layer) for layer in usual]


def test_values_of_the_meta_device_are_not_drawn(monkeypatch):
    drawn = []
    monkeypatch.setattr(nn.init, "_no_grad_uniform_", lambda *_: drawn.append("uniform"))
    with Unfilled():
        layers()
    assert not drawn


def test_other_devices_get_their_values():
    with Unfilled():
        made = nn.BatchNorm1d(3, device="cpu")
    assert made.weight.tolist() == [1.0] * 3
    assert made.running_mean.tolist() == [0.0] * 3
