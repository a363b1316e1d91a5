"""PyTorch allocates a workspace for each handle of cuBLAS and stream; a device has a handle for each direction."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.machine.profile import Profile, load_profile
from gpipe_bench.simulator import simulate

GIB = 2**30


def allocated(layers, mib, **options):
    profile = Profile(**{**load_profile("h100").settings, "cublas_workspace_mib": mib})
    with torch.device("meta"):
        made, sample = nn.Sequential(*(layer() for layer in layers)), torch.empty(1, 8, 16, 16)
    step = simulate(made, batch_size=4, chunks=2, sample=sample, profile=profile, **options)
    return [round(use.peak_allocated_gib * GIB) for use in step.devices]


def product():
    return nn.Linear(16, 16)


def frozen():
    return product().requires_grad_(False)


def convolution():
    return nn.Conv2d(8, 8, 3, padding=1)


@pytest.mark.parametrize(
    ("layers", "options", "counts"),
    [
        ([product, product], {"balance": [1, 1]}, [2, 2]),
        ([product, convolution], {"balance": [1, 1]}, [2, 0]),
        ([convolution, convolution], {"balance": [1, 1]}, [0, 0]),
        ([frozen, convolution], {"balance": [1, 1]}, [1, 0]),
        ([frozen, product], {"balance": [1, 1], "devices": [0, 0]}, [2]),
        ([product, product], {"balance": [1, 1], "devices": [0, 0]}, [2]),
        ([convolution, product], {"balance": [1, 1], "devices": [0, 0]}, [2]),
        ([product] * 4, {"balance": [1] * 4, "schedule": "interleaved"}, [2, 2]),
    ],
)
def test_a_device_holds_one_for_each_direction_that_multiplies_matrices(layers, options, counts):
    without, some = (allocated(layers, mib, **options) for mib in (0, 8.125))
    assert [more - less for more, less in zip(some, without, strict=True)] == [8_519_680 * count for count in counts]


def test_gpus_have_the_size_that_pytorch_chooses_for_them():
    sizes = {name: load_profile(name).cublas_workspace_mib for name in ("h100", "h200", "a100", "v100", "p100", "p40")}
    assert sizes == {"h100": 32, "h200": 32, "a100": 8.125, "v100": 8.125, "p100": 0, "p40": 0}
