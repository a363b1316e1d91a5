"""Peaks of live bytes with a schedule: simulated, and of the engine's runtime on the CPU."""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from tests.simulator import test_live_frozen, test_live_models
from tests.simulator.live import live_peaks, work_of
from tests.simulator.test_live_bytes import LAYERS, ROWS, UNIT, Scale

MODELS = test_live_models.MODELS | {
    f"{name}, some frozen": (lambda layers=layers: layers, (2 * test_live_frozen.ROWS, 64), balance)
    for name, (layers, balance) in test_live_frozen.MODELS.items()
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("m", "devices"), [(1, 2), (4, 3), (5, 2)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_peak_is_that_of_the_engine(name, m, devices, checkpoint, early):
    n = devices * (2 if name == "interleaved" else 1)
    module, x = nn.Sequential(*(Scale() for _ in range(n * LAYERS))), torch.ones(ROWS * m, UNIT // 4)
    components = Components(early_recompute=early)
    real, simulated = live_peaks(
        module, x, [LAYERS] * n, m=m, checkpoint=checkpoint, schedule=name, devices=devices, components=components
    )
    # But for the losses and their gradients, some numbers for each micro-batch.
    assert 0 <= real - simulated <= 8 * m


# On accelerators W makes the gradient of the input of a batch norm again (cuDNN), on the CPU it does not.
AGAIN = {name for name in MODELS if "cut before a ReLU" in name or "BatchNorm" in name}
WAYS = [("gpipe", "always"), ("1f1b", "always"), ("1f1b", "except_last"), ("gpipe", "never")]


@cache
def prepared(name, split):
    """A model, its batch, balance and workload, for schedules that split backward passes, or do not."""
    make, shape, balance = MODELS[name]
    module, x = nn.Sequential(*map(copy.deepcopy, make())), torch.ones(shape)
    return module, x, balance, work_of(module, x, balance, 2, "zb_h1" if split else "gpipe")


@pytest.mark.parametrize(("schedule", "checkpoint"), [*WAYS, ("zb_h1", "always"), ("zb_h2", "never")])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_model_is_that_of_the_engine(name, schedule, checkpoint):
    """A cell makes no leaves of its inputs, so no gradient is copied; one without gradients is no checkpoint."""
    module, x, balance, work = prepared(name, schedule.startswith("zb"))
    options = {"schedule": schedule, "components": Components(early_recompute=schedule == "gpipe")}
    real, simulated = live_peaks(module, x, balance, m=2, checkpoint=checkpoint, work=work, **options)
    if schedule.startswith("zb") and name in AGAIN:
        assert 0.998 * real <= simulated <= 1.04 * real
    else:
        assert simulated == pytest.approx(real, rel=0.002)
