"""Partitions that train nothing, beside the engine: no checkpoint, no gradient, nothing kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.machine.profile import load_profile
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.simulator import simulate
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.build import build_workload
from tests.simulator.live import live_peaks
from tests.simulator.support import Plain, order
from tests.simulator.test_live_models import Cat, One, Stash, Two, conv

ROWS = 64


def linear(*, trained=True):
    return nn.Linear(64, 64).requires_grad_(trained)


class Numbered(nn.Module):
    """Sends whole numbers along, which have no gradient."""

    def forward(self, x):
        return torch.tanh(x), torch.ones(x.shape, dtype=torch.int64, device=x.device)


class Used(nn.Module):
    def forward(self, values):
        return values[0] * values[1]


MODELS = {
    "no parameters": ([nn.Tanh(), nn.GELU(), linear(), nn.GELU(), nn.ReLU(), linear()], [1, 1, 4]),
    "frozen": ([linear(trained=False), nn.Tanh(), linear(trained=False), nn.GELU(), linear(), nn.Tanh()], [2, 2, 2]),
    "frozen in between": ([linear(), nn.Tanh(), linear(trained=False), nn.Tanh(), linear()], [2, 2, 1]),
    "tuples": ([Two(), One(), nn.Tanh(), linear()], [1, 1, 2]),
    "whole numbers": ([linear(), Numbered(), Used(), linear()], [2, 2]),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_the_peak_is_that_of_the_engine(name, checkpoint):
    layers, balance = MODELS[name]
    x = torch.ones(2 * ROWS, 64)
    real, simulated = live_peaks(nn.Sequential(*layers), x, balance, m=2, checkpoint=checkpoint)

    assert simulated == pytest.approx(real, rel=0.002)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_skip_that_needs_no_gradient(checkpoint):
    layers = [nn.Tanh(), Stash(), conv(8), nn.Tanh(), Cat(), conv(16)]
    x = torch.ones(16, 8, 8, 8)
    real, simulated = live_peaks(nn.Sequential(*layers), x, [2, 2, 2], m=2, checkpoint=checkpoint)

    assert simulated == pytest.approx(real, rel=0.002)


@pytest.mark.parametrize("schedule", [None, "gpipe"])
def test_nothing_is_computed_again_and_no_gradient_copied(schedule):
    layers, balance = MODELS["frozen"]
    work = build_workload(
        nn.Sequential(*layers), balance=balance, batch_size=4, chunks=2, profile=load_profile("p40"),
        sample=torch.ones(4, 64), optimizer=None,
    )  # fmt: skip
    names = order(run(work, Plain(), Settings(checkpoint="always", schedule=schedule)))

    assert sorted(name for name in names if name[0] in "RBc") == ["B0,2", "B1,2", "R0,2", "R1,2"]
    assert len(names) == len("F") * 6 + len("C") * 4 + len("RB") * 2


def test_large_runs_do_the_same():
    layers, _ = MODELS["frozen"]
    given = {"balance": [2, 2, 2], "batch_size": 2 * 400, "sample": torch.ones(1, 64), "profile": "p40"}
    small, large = (simulate(nn.Sequential(*layers), chunks=chunks, **given) for chunks in (4, 400))

    for step in (small, large):
        assert {event.kind for event in step.events if event.partition < 2} == {"forward", "copy"}
