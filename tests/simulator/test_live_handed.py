"""With a schedule the gradient of an only output is handed over: nobody but the task holds it, in the simulation, too.

Of several outputs the only one that needs a gradient counts.
"""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.skip import pop, skippable
from tests.simulator.live import live_peaks, work_of
from tests.simulator.test_live_models import One, Stash, Two

WIDTH = 64
# Gradients of a few hundred bytes, of 64 KiB and a little less, and larger ones.
ROWS = (3, 255, 256, 512)
IN_ORDER = Components(clock_cycle=False)


def chain():
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def pairs():
    return nn.Sequential(nn.Linear(8, WIDTH), Two(), One(), nn.Linear(WIDTH, 8))


class Masked(nn.Module):
    """Its second output needs no gradient."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, WIDTH)

    def forward(self, x):
        return self.linear(x), x > 0


class ApplyMask(nn.Module):
    def forward(self, values):
        x, mask = values
        return torch.tanh(x) * mask.any(), mask


class Drop(nn.Module):
    def forward(self, values):
        return values[0]


def masked():
    return nn.Sequential(Masked(), ApplyMask(), ApplyMask(), Drop(), nn.Linear(WIDTH, 8))


@skippable(pop=["skip"])
class Product(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x * skip


def skips():
    """Two partitions give two tensors that need a gradient: the output and the skip."""
    return nn.Sequential(nn.Linear(8, WIDTH), Stash(), nn.Tanh(), Product(), nn.Linear(WIDTH, 8))


def batch_skips():
    """The batch goes around the first two partitions; it needs no gradient, which is that of the output alone."""
    return nn.Sequential(Stash(), nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8), Product(), nn.Linear(8, 8))


CASES = [
    (chain, (1, 2, 2)),
    (chain, (1, 1, 1, 2)),
    (pairs, (2, 2)),
    (masked, (1, 1, 3)),
    (skips, (2, 1, 2)),
    (batch_skips, (2, 1, 3)),
]


@cache
def prepared(make, balance, rows, m, schedule):
    """A model, its batch, balance and workload."""
    module, x = make(), torch.ones(m * rows, 8)
    return module, x, balance, work_of(module, x, balance, m, schedule)


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1"])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("make", "balance"), CASES)
@pytest.mark.parametrize("m", [1, 2])
def test_the_peak_is_that_of_the_engine(make, balance, checkpoint, rows, m, schedule):
    module, x, balance, work = prepared(make, balance, rows, m, schedule)
    options = {"schedule": schedule, "components": IN_ORDER}
    real, simulated = live_peaks(module, x, balance, m=m, checkpoint=checkpoint, work=work, **options)
    # But for the losses, a number for each micro-batch.
    assert simulated == pytest.approx(real, rel=0.001, abs=8 * m)
