"""What tensors hold, beside what the engine holds on the CPU, where every byte of every tensor can be counted.

One allocator for all partitions, so that peaks are those of the whole. Copies are real with transfer='host'.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.measure.memory import LiveBytes
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.build import build_workload
from tests.engine.support import label
from tests.simulator.support import Plain

UNIT, ROWS, LAYERS = 1024, 4, 2
SWITCHES = [
    Components(),
    Components(fork_join=False),
    Components(early_recompute=False),
    Components(clock_cycle=False),
    Components(clock_cycle=False, fork_join=False, early_recompute=False),
]


class Scale(nn.Module):
    """One unit of parameters."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, UNIT // 4))

    def forward(self, x):
        return torch.tanh(x * self.weight)


class Loss(torch.autograd.Function):
    """A sum that keeps its input, as losses do, and makes a gradient of its size."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sum()

    @staticmethod
    def backward(ctx, grad):
        return torch.ones_like(ctx.saved_tensors[0])


def peaks(m, n, components, checkpoint):
    """(real, simulated) in units."""
    module, x = nn.Sequential(*(Scale() for _ in range(n * LAYERS))), torch.ones(ROWS * m, UNIT // 4)
    balance = [LAYERS] * n
    options = {"chunks": m, "checkpoint": checkpoint, "components": components, "transfer": "host"}
    pipe = GPipe(module, balance, devices=["cpu"] * n, **options)
    # The first batch copies inputs, to see whether layers write to them.
    Loss.apply(pipe(x)).backward()
    pipe.zero_grad(set_to_none=True)
    with LiveBytes(pipe) as live, pipe.observe(live):
        Loss.apply(pipe(x)).backward()
    work = build_workload(
        module, balance=balance, batch_size=ROWS * m, chunks=m, profile=load_profile("p40"), sample=x, optimizer=None
    )
    places = {"devices": (0,) * n, "streams": False}
    found = run(work, Plain(), Settings(components, checkpoint, transfer="host", **places))
    return live.peak_total_bytes / UNIT, found.peak_live_bytes[0] / UNIT


@pytest.mark.parametrize("components", SWITCHES, ids=label)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(("m", "n"), [(1, 1), (3, 1), (1, 2), (4, 2), (3, 3)])
def test_the_peak_is_that_of_the_engine(m, n, components, checkpoint):
    real, simulated = peaks(m, n, components, checkpoint)
    # But for the loss and its gradient, two numbers.
    assert 0 <= real - simulated <= 8 / UNIT
