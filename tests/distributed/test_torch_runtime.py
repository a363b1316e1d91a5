"""CSV files that are written here drive PyTorch's own runtime of schedules, with the gradients of the plain module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench.schedules import named_schedule, to_csv
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from tests.distributed.ranks import run_processes

M, SAMPLES, WIDTH = 4, 8, 3


def layers(n):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(n))).double()


def batch():
    draw = torch.Generator().manual_seed(1)
    return torch.rand(SAMPLES, WIDTH, generator=draw).double(), torch.rand(SAMPLES, WIDTH, generator=draw).double()


def train(rank, file, homes):
    """One step of PyTorch's runtime; returns the gradients of the own stages."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    whole = layers(len(homes))
    own = {j: copy.deepcopy(whole[j]) for j, home in enumerate(homes) if home == rank}
    stages = [PipelineStage(module, j, len(homes), torch.device("cpu")) for j, module in own.items()]
    runtime = _PipelineScheduleRuntime(stages, M, loss_fn=nn.functional.mse_loss)
    runtime._load_csv(file, format="compute_only")
    inputs, target = batch()
    runtime.step(*([inputs] if homes[0] == rank else []), **({"target": target} if homes[-1] == rank else {}))
    return {j: [parameter.grad for parameter in module.parameters()] for j, module in own.items()}


NAMES = ("1f1b", "zb_h1", "interleaved", "zb_v", "dualpipe_v")
SCHEDULES = {name: named_schedule(name, M, 4 if name in TWO_PER_DEVICE else 2, 2) for name in NAMES}


def train_all(rank, folder):
    return {name: train(rank, f"{folder}/{name}.csv", schedule.placement) for name, schedule in SCHEDULES.items()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each of two processes gives, for each schedule."""
    folder = tmp_path_factory.mktemp("schedules")
    for name, schedule in SCHEDULES.items():
        (folder / f"{name}.csv").write_text(to_csv(schedule))
    return run_processes(2, folder, train_all, str(folder))


@pytest.mark.parametrize("name", NAMES)
def test_pytorch_trains_with_a_schedule_that_is_written_here(name, trained):
    assert all(isinstance(one, dict) for one in trained), trained
    found, schedule = [one[name] for one in trained], SCHEDULES[name]
    plain = layers(schedule.partitions)
    inputs, target = batch()
    nn.functional.mse_loss(plain(inputs), target).backward()
    gradients = found[0] | found[1]
    for j, layer in enumerate(plain):
        for own, parameter in zip(gradients[j], layer.parameters(), strict=True):
            torch.testing.assert_close(own, parameter.grad, rtol=1e-12, atol=0)
