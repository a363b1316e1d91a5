"""A step that is bound by the host says so."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_bench.simulator import simulate


def step(width, **options):
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        sample = torch.empty(1, width)
    return simulate(layers, balance=[4], batch_size=64, sample=sample, profile="h200", memory=False, **options)


def test_small_layers_wait_for_the_host():
    small = step(16)
    assert small.bound_by_host
    assert small.host_fraction > 0.95


def test_large_layers_do_not():
    assert not step(8192).bound_by_host
    assert 0 < step(8192).host_fraction < 0.95


def test_recomputation_is_launched_too():
    assert step(16, checkpoint="always").step_time_ms > 1.05 * step(16, checkpoint="never").step_time_ms
