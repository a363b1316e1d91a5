"""On one accelerator: dropout masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import is_recomputing
from tests.engine.support import FACTORIAL, MODES, SOME, label, numbered
from tests.gpu.support import placed

pytestmark = pytest.mark.gpu

SIZE, M = 64, 4


class Drop(nn.Module):
    """Dropout that keeps its masks; column 0 of its input is the number of the micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.dropout = nn.Dropout(0.5)
        self.first: dict[int, list[Tensor]] = {}
        self.again: dict[int, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        mask = self.dropout(torch.ones_like(x))
        i = int(x[0, 0])
        (self.again if is_recomputing() else self.first).setdefault(i, []).append(mask.cpu())
        return x * self.weight * torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], 1)


def batch(device: torch.device) -> Tensor:
    return (numbered(M, 2) + torch.zeros(SIZE)).to(device)


def step(pipe, device) -> Tensor:
    pipe.zero_grad()
    output = pipe(batch(device))
    output.square().sum().backward()
    return output.detach()


def drop_pipe(devices, **options):
    return placed(nn.Sequential(Drop(), Drop(), Drop()), [1, 1, 1], devices, chunks=M, **options)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
def test_recomputed_masks_are_those_of_the_first_pass(devices, components, transfer):
    pipe = drop_pipe(devices, checkpoint="always", components=components, transfer=transfer)
    for _ in range(3):
        step(pipe, devices[0])
    for layer in pipe:
        assert sorted(layer.first) == list(range(M))
        for i, masks in layer.first.items():
            assert len(masks) == 3
            assert all(map(torch.equal, masks, layer.again[i]))


@pytest.mark.parametrize("components", SOME, ids=label)
def test_also_between_accelerator_and_cpu(device, components):
    cpu = torch.device("cpu")
    pipe = placed(
        nn.Sequential(Drop(), Drop(), Drop()), [1, 1, 1], [device, cpu, cpu],
        chunks=M, checkpoint="always", components=components,
    )  # fmt: skip
    for _ in range(3):
        step(pipe, device)
    for layer in pipe:
        for i in range(M):
            assert all(map(torch.equal, layer.first[i], layer.again[i]))


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_run_from_the_same_seed_draws_the_same(device, checkpoint, transfer):
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        pipe = drop_pipe([device], checkpoint=checkpoint, transfer=transfer)
        outputs.append([step(pipe, device) for _ in range(3)])
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_one_microbatch_draws_what_the_plain_module_draws(device, checkpoint, transfer):
    torch.manual_seed(5)
    expected = nn.Sequential(Drop(), Drop(), Drop()).to(device)(batch(device))
    pipe = drop_pipe([device], checkpoint=checkpoint, transfer=transfer)
    pipe.chunks = 1
    torch.manual_seed(5)
    torch.testing.assert_close(pipe(batch(device)), expected)


def test_a_recomputation_leaves_the_default_generator_where_it_was(device):
    pipe = drop_pipe([device], checkpoint="always")
    output = pipe(batch(device))
    module = torch.get_device_module(device)
    before = module.get_rng_state(device.index)
    output.sum().backward()
    assert torch.equal(module.get_rng_state(device.index), before)
