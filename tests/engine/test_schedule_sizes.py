"""Every schedule with every number of micro-batches and partitions: the plain module's outputs and gradients."""

from __future__ import annotations

import copy
import os
from itertools import product

import pytest
import torch
from torch import nn

from gpipe_bench.schedules import SCHEDULES
from tests.engine.steps import ALL, DOUBLE, samples, scheduled, step, targets
from tests.engine.support import (
    MODES,
    Mix,
    assert_same,
    crossing_model,
    skip_pair,
)

# One case of the grid in so many; 1 runs all of them, which takes some minutes.
STRIDE = int(os.environ.get("ENGINE_GRID_STRIDE", "61"))

every_schedule = pytest.mark.parametrize("schedule", ALL)
every_mode = pytest.mark.parametrize("checkpoint", MODES)
both_workers = pytest.mark.parametrize("workers", ["always", "never"])


# --- sizes -----------------------------------------------------------------------------------------------------------


def grid() -> list[tuple[str | None, str, str, int, int]]:
    sizes = product(ALL, MODES, ("always", "never"), range(1, 9), range(1, 9))
    return [case for case in sizes if case[0] not in DOUBLE or case[4] % 2 == 0]


@pytest.mark.parametrize(("schedule", "checkpoint", "workers", "m", "n"), grid()[::STRIDE])
def test_every_number_of_microbatches_and_partitions(schedule, checkpoint, workers, m, n):
    torch.manual_seed(4)
    out, back = skip_pair()
    members = [Mix() for _ in range(8)]
    plain = nn.Sequential(nn.Sequential(out, members[0]), *members[1:7], nn.Sequential(members[7], back)).double()
    balance = [8 // n + (j < 8 % n) for j in range(n)]
    pipe = scheduled(copy.deepcopy(plain), balance, schedule, chunks=m, checkpoint=checkpoint, workers=workers)
    rows = max(2 * m - 1, 1)
    x, target = samples(rows, 3), targets(rows)
    assert_same(step(pipe, x, target), step(plain, x, target))


@pytest.mark.parametrize("per_device", [1, 2, 4])
@every_mode
def test_interleaved_with_any_number_of_partitions_per_device(checkpoint, per_device):
    plain = crossing_model()
    plain.append(Mix().double())
    from gpipe_bench import GPipe

    balance = [8 // (2 * per_device)] * (2 * per_device)
    pipe = GPipe(
        copy.deepcopy(plain), balance, devices=["cpu"] * 2, chunks=3, checkpoint=checkpoint, schedule="interleaved"
    )
    x, target = samples(7, 3), targets(7)
    assert_same(step(pipe, x, target), step(plain, x, target))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_empty_batch(schedule):
    plain = nn.Sequential(*(Mix() for _ in range(4))).double()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3)
    x, target = samples(0, 3), targets(0)
    assert_same(step(pipe, x, target), step(plain, x, target))
