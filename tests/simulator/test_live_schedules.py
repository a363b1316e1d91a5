"""The most bytes alive at once with schedules: those of the engine's runtime on the CPU, and of the simulation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.measure.live_bytes import LiveBytes
from gpipe_bench.schedule import CHECKPOINT_MODES
from gpipe_bench.simulator.clock.run import Settings, run
from gpipe_bench.simulator.hardware.profile import load_profile
from gpipe_bench.simulator.workloads.build import build_workload
from tests.simulator.support import Plain
from tests.simulator.test_live_bytes import LAYERS, ROWS, UNIT, Loss, Scale


def peaks(name, m, devices, checkpoint, *, early):
    """(real, simulated) in units; all actions are taken in one thread."""
    n = devices * (2 if name == "interleaved" else 1)
    module, x = nn.Sequential(*(Scale() for _ in range(n * LAYERS))), torch.ones(ROWS * m, UNIT // 4)
    components, balance, target = Components(early_recompute=early), [LAYERS] * n, torch.zeros(ROWS * m, 1)
    options = {"checkpoint": checkpoint, "components": components, "transfer": "host", "schedule": name}
    pipe = GPipe(module, balance, devices=["cpu"] * devices, chunks=m, workers="never", **options)
    # The first batch copies inputs, to see whether layers write to them.
    pipe.step(x, target, lambda output, _: Loss.apply(output))
    pipe.zero_grad(set_to_none=True)
    with LiveBytes(pipe) as live, pipe.observe(live):
        pipe.step(x, target, lambda output, _: Loss.apply(output))
    work = build_workload(
        module, balance=balance, batch_size=len(x), chunks=m, profile=load_profile("p40"), sample=x, optimizer=None
    )
    found = run(work, Plain(), Settings(**options, devices=(0,) * n, streams=False, workers=False))
    return live.peak_total_bytes / UNIT, found.peak_live_bytes[0] / UNIT


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
@pytest.mark.parametrize(("m", "devices"), [(1, 2), (4, 3), (5, 2)])
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_the_peak_is_that_of_the_engine(name, m, devices, checkpoint, early):
    real, simulated = peaks(name, m, devices, checkpoint, early=early)
    # But for the losses and their gradients, some numbers for each micro-batch.
    assert 0 <= real - simulated <= 8 * m / UNIT
