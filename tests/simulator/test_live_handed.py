"""With a schedule large gradients are handed over to tasks: nobody else holds them, neither does the simulation."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.program import HANDED_OVER_BYTES
from gpipe_bench.schedule import CHECKPOINT_MODES
from tests.simulator.live import live_peaks, work_of
from tests.simulator.test_live_models import One, Two

WIDTH = 64
IN_ORDER = Components(clock_cycle=False)


def chain():
    return nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 8))


def pairs():
    return nn.Sequential(nn.Linear(8, WIDTH), Two(), One(), nn.Linear(WIDTH, 8))


@cache
def prepared(make, balance, rows, m):
    """A model, its batch, balance and workload."""
    module, x = make(), torch.ones(m * rows, 8)
    return module, x, balance, work_of(module, x, balance, m, "gpipe")


@pytest.mark.parametrize("rows", [HANDED_OVER_BYTES // (4 * WIDTH) - 1, HANDED_OVER_BYTES // (4 * WIDTH), 512])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("make", "balance"), [(chain, (1, 2, 2)), (chain, (1, 1, 1, 2)), (pairs, (2, 2))])
@pytest.mark.parametrize("m", [1, 2])
def test_the_peak_is_that_of_the_engine(make, balance, checkpoint, rows, m):
    module, x, balance, work = prepared(make, balance, rows, m)
    options = {"schedule": "gpipe", "components": IN_ORDER}
    real, simulated = live_peaks(module, x, balance, m=m, checkpoint=checkpoint, work=work, **options)
    assert simulated == pytest.approx(real, rel=0.001)
