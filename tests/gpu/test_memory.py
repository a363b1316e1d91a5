"""On one accelerator: what each component costs and saves in memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.skip import pop, skippable, stash
from tests.engine.support import MODES, SOME, label
from tests.gpu.support import LATE_BALANCE, late_batch, late_model, placed

pytestmark = pytest.mark.gpu

MIB = 2**20
ROWS, COLUMNS = 64, 4096
BLOCK = ROWS * COLUMNS * 4
"""Bytes of one hidden tensor of one micro-batch: 1 MiB."""


class Deep(nn.Module):
    """(B, 1) -> (B, 1) by hidden tensors that its backward pass needs, a MiB each for 64 rows."""

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.depth = depth
        self.weight = nn.Parameter(torch.full((COLUMNS,), 0.5))

    def forward(self, x):
        hidden = x * self.weight
        for _ in range(self.depth):
            hidden = torch.tanh(hidden)
        return hidden.mean(1, keepdim=True)


def peak(device, m=8, layers=(Deep, Deep), **options) -> int:
    """Peak of allocated bytes of the second step, above what is there before it."""
    pipe = placed(nn.Sequential(*(make() for make in layers)), [1] * len(layers), [device], chunks=m, **options)
    x = torch.rand(m * ROWS, 1, device=device)
    for _ in range(2):
        pipe.zero_grad()
        torch.accelerator.synchronize(device)
        torch.accelerator.reset_peak_memory_stats(device)
        before = torch.accelerator.memory_allocated(device)
        pipe(x).sum().backward()
        torch.accelerator.synchronize(device)
    return torch.accelerator.max_memory_allocated(device) - before


@pytest.mark.parametrize("transfer", ["direct", "host"])
def test_checkpoints_save_memory(device, transfer):
    """8 micro-batches x 2 partitions x 9 hidden tensors without, those of a few recomputed tasks with."""
    without, always = (peak(device, checkpoint=mode, transfer=transfer) for mode in ("never", "always"))
    assert without >= 8 * 2 * 8 * BLOCK
    assert always <= without / 3


def test_fork_and_join_save_memory(device):
    """Without them all micro-batches of the last partition are recomputed before the first backward pass."""
    off, on = (
        peak(device, checkpoint="always", transfer="host", components=Components(fork_join=value))
        for value in (False, True)
    )
    assert off >= 8 * 8 * BLOCK
    assert on <= off / 2


@skippable(stash=["wide"])
class Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(COLUMNS))

    def forward(self, x):
        yield stash("wide", x * self.weight)
        return x


@skippable(pop=["wide"])
class Gather(nn.Module):
    def forward(self, x):
        wide = yield pop("wide")
        return x + wide.mean(1, keepdim=True)


class Scale(nn.Module):
    """A layer with a parameter, so that its partition is checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


def test_portals_save_the_copies_that_partitions_between_would_keep(device):
    """Checkpoints keep their inputs: without portals the skip on each of the three partitions after its source."""
    layers = (Spread, Scale, Scale, Gather)
    off, on = (
        peak(device, layers=layers, checkpoint="always", transfer="host", components=Components(portals=value))
        for value in (False, True)
    )
    assert off - on >= 8 * BLOCK


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", SOME, ids=label)
def test_steps_leave_nothing_allocated(device, components, checkpoint, transfer):
    pipe = placed(
        late_model(), LATE_BALANCE, [device], chunks=4, components=components, checkpoint=checkpoint, transfer=transfer
    )
    counts = []
    for _ in range(4):
        pipe(late_batch(device)).sum().backward()
        pipe.zero_grad()
        torch.accelerator.synchronize(device)
        # blocks that another stream has used are given back when the allocator is next asked
        torch.empty(1, device=device)
        counts.append(torch.accelerator.memory_allocated(device))
    assert counts[1:] == counts[1:2] * 3
