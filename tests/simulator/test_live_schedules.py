"""Peaks of live bytes with a schedule: simulated, and of the engine's runtime on the CPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.measure.live_bytes import LiveBytes
from gpipe_bench.schedule import CHECKPOINT_MODES
from gpipe_bench.simulator.clock.run import Settings, run
from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.workloads.build import build_workload
from tests.simulator import test_live_frozen, test_live_models
from tests.simulator.live import without_scratch
from tests.simulator.support import Plain
from tests.simulator.test_live_bytes import LAYERS, ROWS, UNIT, Loss, Scale

MODELS = test_live_models.MODELS | {
    f"{name}, some frozen": (lambda layers=layers: layers, (2 * test_live_frozen.ROWS, 64), balance)
    for name, (layers, balance) in test_live_frozen.MODELS.items()
}


def peaks(module, x, balance, name, m, devices, checkpoint, *, early):
    """(real, simulated) in bytes; all actions are taken in one thread."""
    components, target, n = Components(early_recompute=early), torch.zeros(len(x), 1), len(balance)
    options = {"checkpoint": checkpoint, "components": components, "transfer": "host", "schedule": name}
    pipe = GPipe(copy.deepcopy(module), balance, devices=["cpu"] * devices, chunks=m, workers="never", **options)
    # The first batch copies inputs, to see whether layers write to them.
    pipe.step(x, target, lambda output, _: Loss.apply(output))
    pipe.zero_grad(set_to_none=True)
    with LiveBytes(pipe) as live, pipe.observe(live):
        pipe.step(x, target, lambda output, _: Loss.apply(output))
    sizes = {"balance": balance, "batch_size": len(x), "chunks": m, "leaves": False}
    work = build_workload(module, **sizes, profile=load_profile("p40"), sample=x, optimizer=None)
    settings = Settings(**options, devices=(0,) * n, streams=False, workers=False)
    found = run(without_scratch(work), Plain(), settings)
    return live.peak_total_bytes, found.peak_live_bytes[0]


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("m", "devices"), [(1, 2), (4, 3), (5, 2)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_peak_is_that_of_the_engine(name, m, devices, checkpoint, early):
    n = devices * (2 if name == "interleaved" else 1)
    module, x = nn.Sequential(*(Scale() for _ in range(n * LAYERS))), torch.ones(ROWS * m, UNIT // 4)
    real, simulated = peaks(module, x, [LAYERS] * n, name, m, devices, checkpoint, early=early)
    # But for the losses and their gradients, some numbers for each micro-batch.
    assert 0 <= real - simulated <= 8 * m


@pytest.mark.parametrize(
    ("schedule", "checkpoint"), [("gpipe", "always"), ("1f1b", "always"), ("1f1b", "except_last"), ("gpipe", "never")]
)
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_of_a_model_is_that_of_the_engine(name, schedule, checkpoint):
    """A cell makes no leaves of its inputs, so no gradient is copied; one without gradients is no checkpoint."""
    make, shape, balance = MODELS[name]
    module = nn.Sequential(*map(copy.deepcopy, make()))
    real, simulated = peaks(
        module, torch.ones(shape), balance, schedule, 2, len(balance), checkpoint, early=schedule == "gpipe"
    )
    assert simulated == pytest.approx(real, rel=0.002)
