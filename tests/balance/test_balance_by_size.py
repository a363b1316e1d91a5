"""Balance by size: bytes worked out by hand, on every device the same."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench.balance import balance_by_size, layer_sizes
from gpipe_bench.errors import BalanceError
from gpipe_bench.models.table import MODELS

DEVICES = ["cpu", "meta"]
FLOAT = 4


class Leaves(nn.Module):
    """Adds ``count`` fresh leaves to its input; the graph keeps each of them and nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.count):
            x = x + torch.rand_like(x, requires_grad=True)
        return x


@pytest.mark.parametrize("device", DEVICES)
def test_activations_that_a_backward_pass_needs_and_parameters_are_counted(device: str) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))

    sizes = layer_sizes(module, torch.rand(16, 4), param_scale=3, device=device)

    # ReLU keeps its output and needs no input, so the first Linear's output is free; the loss keeps the last.
    assert sizes == [3 * FLOAT * (4 * 8 + 8), FLOAT * 16 * 8, 3 * FLOAT * (8 * 2 + 2) + FLOAT * 16 * 2]


@pytest.mark.parametrize("device", DEVICES)
def test_an_output_that_is_changed_in_place_counts_once(device: str) -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(8, 2, bias=False))

    sizes = layer_sizes(module, torch.rand(16, 4), param_scale=0, device=device)

    assert sizes == [FLOAT * 16 * 8, 0, 0, FLOAT * 16 * 2]


def test_activations_are_those_of_the_first_microbatch() -> None:
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Sigmoid())

    assert layer_sizes(module, torch.rand(10, 4), chunks=4, param_scale=0) == [0, FLOAT * 3 * 8]


def test_frozen_parameters_and_buffers_count_once() -> None:
    module = nn.Sequential(nn.Linear(4, 4).requires_grad_(requires_grad=False), nn.BatchNorm1d(4, affine=False))

    sizes = layer_sizes(module, torch.rand(2, 4), param_scale=10)

    running_statistics, batches_tracked, output = FLOAT * 2 * 4, 8, FLOAT * 2 * 4
    assert sizes == [FLOAT * (4 * 4 + 4), running_statistics + batches_tracked + output]


@pytest.mark.parametrize("device", DEVICES)
def test_leaves_that_only_the_graph_keeps_are_counted(device: str) -> None:
    module = nn.Sequential(*map(Leaves, [1, 2, 3, 0]))

    assert layer_sizes(module, torch.rand(2, 3), device=device) == [FLOAT * 6 * count for count in (1, 2, 3 + 1, 0)]


def test_the_balance_is_optimal_for_the_sizes() -> None:
    by_activations = [Leaves(count) for count in (1, 2, 3, 4, 5, 6)]
    by_parameters = [nn.Linear(i + 1, i + 2) for i in range(6)]
    batch = torch.rand(7, 10)

    assert balance_by_size(2, nn.Sequential(*by_activations), batch) == [4, 2]
    assert balance_by_size(2, nn.Sequential(*reversed(by_activations)), batch) == [2, 4]
    assert balance_by_size(2, nn.Sequential(*by_parameters), torch.rand(7, 1), param_scale=100) == [4, 2]


def test_the_bytes_of_unet_at_published_size_are_counted_without_memory() -> None:
    with torch.device("meta"):
        module, batch = MODELS["unet"].build(), torch.empty(128, 3, 192, 192)

    sizes = layer_sizes(module, batch, chunks=8, param_scale=2)

    image, channels = FLOAT * 16 * 64 * 192 * 192, FLOAT * 16 * 64
    convolution, dropout, norm, relu = sizes[4:8]
    assert convolution == 2 * FLOAT * 9 * 64 * 64
    assert dropout == image + channels
    # Mean and inverse standard deviation of each channel.
    assert norm == image + 2 * channels
    assert relu == image
    assert [len(sizes), sizes[20]] == [241, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunks": 0}, "chunks must be a whole number of at least 1, got 0"),
        ({"param_scale": -1.0}, r"param_scale must not be negative, got -1.0"),
        ({"param_scale": float("nan")}, "param_scale must not be negative, got nan"),
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        balance_by_size(1, nn.Sequential(nn.ReLU()), torch.rand(2), **arguments)  # type: ignore[arg-type]  # on purpose


def test_a_sample_without_batch_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match="sample must have the mini-batch as its first dimension"):
        balance_by_size(1, nn.Sequential(nn.ReLU()), torch.tensor(1.0))


def test_more_partitions_than_layers_are_refused() -> None:
    with pytest.raises(BalanceError, match="got 2 partitions for 1 layers"):
        balance_by_size(2, nn.Sequential(nn.ReLU()), torch.rand(2))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU, found none")
def test_a_gpu_keeps_the_bytes_that_are_counted() -> None:
    module = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.Sigmoid(), nn.Conv2d(16, 8, 3), nn.Sigmoid())
    batch = torch.rand(32, 3, 64, 64)
    on_host = layer_sizes(module, batch, param_scale=0)
    module, batch = module.cuda(), batch.cuda()

    assert layer_sizes(module, batch, param_scale=0) == on_host

    # The first run leaves the libraries' workspaces behind.
    module(batch)
    before = torch.cuda.memory_allocated()
    output = module(batch)
    kept = torch.cuda.memory_allocated() - before
    assert output.requires_grad
    assert sum(on_host) <= kept < sum(on_host) + 512 * len(module), "the allocator rounds up to 512 bytes"


def test_what_compiles_models_is_not_loaded() -> None:
    program = (
        "import sys, torch\n"
        "from gpipe_bench.balance import layer_sizes\n"
        "layer_sizes(torch.nn.Sequential(torch.nn.Linear(2, 2)), torch.rand(1, 2))\n"
        "sys.exit('torch._dynamo' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
