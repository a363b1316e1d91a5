"""What tensors of real layers hold, beside what the engine holds on the CPU: who keeps what crosses a boundary.

A boundary tensor that no backward pass needs goes when its task has run, one that a layer keeps when its node has run.
The layers here do the same on every device; all tasks are issued in one thread, so that none runs beside another. More
than three micro-batches would show the counter of tensors itself: a dispatch mode keeps autograd from adding in place.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.skip import peek, pop, skippable, stash
from tests.simulator.live import live_peaks, work_of


@skippable(stash=["skip"])
class Stash(nn.Module):
    """Its output and the skip are one tensor, which is its input."""

    def forward(self, x):
        yield stash("skip", x)
        return x


@skippable(pop=["skip"])
class Cat(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return torch.cat([x, skip], 1)


@skippable(peek=["skip"])
class Gate(nn.Module):
    """Keeps what it reads."""

    def forward(self, x):
        skip = yield peek("skip")
        return x * torch.sigmoid(skip)


class Two(nn.Module):
    def forward(self, x):
        return torch.tanh(x), x * 2


class One(nn.Module):
    def forward(self, values):
        return values[0] + values[1]


class Residual(nn.Module):
    """The gradient of its output is a part of that of its input."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.relu(self.linear(x))


def conv(inputs, outputs=8):
    return nn.Conv2d(inputs, outputs, 3, padding=1)


def twice():
    return nn.Upsample(scale_factor=2)


IMAGES, ROWS = (16, 8, 8, 8), (64, 64)
MODELS = {
    "activations at the ends": (lambda: [nn.Linear(64, 64), nn.ReLU()] * 3, ROWS, [2, 2, 2]),
    "weights that outweigh activations": (lambda: [nn.Linear(512, 512), nn.ReLU()] * 3, (8, 512), [2, 2, 2]),
    "one heavy weight": (lambda: [nn.Linear(512, 512), nn.Linear(512, 8)], (8, 512), [1, 1]),
    "cut before a ReLU": (lambda: [conv(8), nn.BatchNorm2d(8), nn.ReLU()] * 3, IMAGES, [2, 3, 4]),
    "Upsample takes it": (lambda: [conv(8), twice(), conv(8), nn.MaxPool2d(2), nn.Tanh(), twice()], IMAGES, [1, 3, 2]),
    "Upsample of what BatchNorm gives": (lambda: [conv(8), nn.BatchNorm2d(8), twice(), conv(8)], IMAGES, [2, 2]),
    "skips that are concatenated": (
        lambda: [conv(8), Stash(), conv(8), nn.Tanh(), conv(8), Cat(), conv(16), nn.ReLU()], IMAGES, [2, 1, 2, 3],
    ),
    "a skip that is read many times": (
        lambda: [conv(8), Stash(), conv(8), Gate(), conv(8), Gate(), Gate(), conv(8), Gate(), nn.Tanh()], IMAGES,
        [2, 2, 3, 3],
    ),
    "a skip that is read past a partition": (
        lambda: [conv(8), nn.Tanh(), Stash(), Gate(), conv(8), conv(8), Gate(), Gate(), Cat(), conv(16)], IMAGES,
        [3, 2, 1, 1, 3],
    ),
    "a partition that only stashes": (
        lambda: [conv(8), nn.ReLU(), Stash(), conv(8), Cat(), conv(16)], IMAGES, [2, 1, 1, 2],
    ),
    "tuples": (lambda: [nn.Linear(64, 64), Two(), One(), nn.Linear(64, 64), Two(), One()], ROWS, [2, 3, 1]),
    "views that are written to": (lambda: [nn.Linear(64, 64), nn.ReLU(inplace=True)] * 3, (16, 4, 64), [2, 1, 3]),
    "folded": (
        lambda: [conv(8), nn.Unfold(3, padding=1), nn.Fold((8, 8), 3, padding=1), nn.Tanh(), conv(8)],
        IMAGES, [2, 2, 1],
    ),
    "sums": (lambda: [Residual() for _ in range(6)], ROWS, [2, 2, 2]),
    "attention's norms": (lambda: [nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU()] * 3, ROWS, [3, 4, 2]),
}  # fmt: skip


@cache
def prepared(name, m):
    """A model, its batch, balance and workload."""
    make, shape, balance = MODELS[name]
    module, x = nn.Sequential(*map(copy.deepcopy, make())), torch.ones(shape)
    return module, x, balance, work_of(module, x, balance, m)


def peaks(name, m, checkpoint, components):
    """(real, simulated) in bytes."""
    module, x, balance, work = prepared(name, m)
    return live_peaks(module, x, balance, m=m, checkpoint=checkpoint, components=components, work=work)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("checkpoint", "m"), [("always", 2), ("except_last", 2), ("never", 1), ("never", 3)])
def test_the_peak_is_that_of_the_engine(name, checkpoint, m):
    real, simulated = peaks(name, m, checkpoint, Components())

    # The gradients of a bias and of its weight come in another order, and the loss is no tensor of the simulation.
    assert simulated == pytest.approx(real, rel=0.002)


@pytest.mark.parametrize("name", [name for name in MODELS if "stash" in name or "skip" in name])
@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
def test_skips_that_ride_along_go_when_a_partition_has_passed_them_on(name, checkpoint):
    real, simulated = peaks(name, 3, checkpoint, Components(portals=False))

    assert simulated == pytest.approx(real, rel=0.002)


@pytest.mark.parametrize(
    "components", [Components(), Components(shared=False), Components(portals=False, shared=False)]
)
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
@pytest.mark.parametrize(
    ("schedule", "devices"), [(None, 4), ("1f1b", 4), ("zb_h1", 4), ("interleaved", 2), ("zb_v", 2)]
)
def test_a_skip_that_is_read_many_times_lives_until_its_last_use(schedule, devices, checkpoint, components):
    make, shape, balance = MODELS["a skip that is read many times"]
    module, x = nn.Sequential(*map(copy.deepcopy, make())), torch.ones(shape)
    options = {"schedule": schedule, "devices": devices, "checkpoint": checkpoint, "components": components}
    real, simulated = live_peaks(module, x, balance, m=2, **options)

    assert simulated == pytest.approx(real, rel=0.002)
