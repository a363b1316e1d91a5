"""What checkpoints copy, beside the engine: inputs that layers write to, and gradients that others hold too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator.workloads.build import build_workload
from gpipe_bench.skip import pop, skippable, stash
from tests.simulator.live import live_peaks
from tests.simulator.test_live_frozen import linear
from tests.simulator.test_live_models import Residual

ROWS, WIDTH = 256, 64


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("skip", torch.sin(x))
        return x


@skippable(pop=["skip"])
class Sum(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return x + skip


class Twice(nn.Module):
    """Two outputs, whose gradients are added up where they came from."""

    def forward(self, x):
        return x, torch.sin(x)


class First(nn.Module):
    def forward(self, values):
        return values[0] * torch.cos(values[1])


@skippable(pop=["skip"])
class Concatenation(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, x):
        skip = yield pop("skip")
        return torch.cat((x, skip), dim=self.dim)


class Turned(nn.Module):
    """The gradient of its input is laid out as its output is, the other way round."""

    def forward(self, x):
        return x.t().contiguous()


def written():
    return nn.ReLU(inplace=True)


WRITING = {
    "first": ([linear(), written(), linear(), written(), nn.Tanh(), linear()], [1, 2, 3]),
    "alone": ([linear(), written(), nn.Tanh(), linear()], [1, 1, 2]),
    "behind another view": ([linear(), nn.Flatten(), written(), linear()], [1, 2, 1]),
    "amid": ([linear(), nn.Tanh(), linear(), written(), linear()], [2, 3]),
    "with a skip": ([linear(), Stash(), written(), nn.Tanh(), Sum(), linear()], [2, 1, 3]),
}
# The gradient of the loss is that of the last partition, where the peak is.
SHARING = {
    "a sum right behind a skip": ([linear(), Stash(), Sum()], [2, 1]),
    "a sum behind a layer": ([linear(), Stash(), nn.Sigmoid(), Sum()], [2, 2]),
    "a sum in the last layer": ([linear(), nn.Tanh(), Residual()], [1, 2]),
    "nothing else": ([linear(), nn.Identity()], [1, 1]),
    "another view": ([linear(), nn.Unflatten(1, (8, 8))], [1, 1]),
    "a concatenation": ([linear(), Stash(), nn.Tanh(), Concatenation(1), nn.Linear(2 * WIDTH, WIDTH)], [2, 3]),
    "one right behind a skip": ([linear(), Stash(), Concatenation(1), nn.Linear(2 * WIDTH, WIDTH)], [2, 2]),
    "one of rows": ([linear(), Stash(), Concatenation(0), linear()], [2, 2]),
    "turned": ([linear(), nn.Tanh(), Turned(), nn.Linear(ROWS, 8)], [2, 2]),
    "two outputs": ([linear(), nn.Tanh(), Twice(), First(), nn.Identity()], [2, 1, 2]),
}


@pytest.mark.parametrize("last", [True, False])
def test_convolutions_give_their_channels_last(last):
    layers = [nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)]
    module = nn.Sequential(*layers).to(memory_format=torch.channels_last if last else torch.contiguous_format)
    x = torch.ones(16, 4, 16, 16)

    real, simulated = live_peaks(module, x, [1, 1], m=2, checkpoint="always")

    assert simulated == pytest.approx(real, rel=0.002)
    work = build_workload(module, balance=[1, 1], batch_size=8, profile=load_profile("p40"), sample=x[:1])
    assert work.partitions[1][8].checkpointed is None


@pytest.mark.parametrize("name", [*WRITING, *SHARING])
@pytest.mark.parametrize("checkpoint", ["always", "never"])
def test_the_peak_is_that_of_the_engine(name, checkpoint):
    layers, balance = (WRITING | SHARING)[name]
    m = 2 if name in WRITING else 1
    # So much of each tensor that one too few shows.
    real, simulated = live_peaks(
        nn.Sequential(*layers), torch.ones(m * ROWS, WIDTH), balance, m=m, checkpoint=checkpoint
    )

    assert simulated == pytest.approx(real, rel=0.002)


def works(layers, balance):
    work = build_workload(
        nn.Sequential(*layers), balance=balance, batch_size=ROWS, profile=load_profile("p40"),
        sample=torch.ones(1, WIDTH), optimizer=None,
    )  # fmt: skip
    return [sizes[ROWS] for sizes in work.partitions]


def test_copied_gradients_take_time():
    task = works(*SHARING["a concatenation"])[1]

    copied = task.checkpointed
    assert copied.backward.launches == task.backward.launches + 1
    assert copied.backward.duration_ns > task.backward.duration_ns
    assert (copied.forward, copied.recompute) == (task.forward, task.recompute)


def test_copies_take_time_and_only_with_a_checkpoint():
    _, task, _ = works(*WRITING["first"])

    copied = task.checkpointed
    assert copied.forward.launches == task.forward.launches + 1
    assert copied.recompute.launches == task.recompute.launches + 1
    assert copied.forward.duration_ns > task.forward.duration_ns
    assert copied.backward == task.backward


@pytest.mark.parametrize(
    ("name", "j", "expected"),
    [
        ("first", 1, True),
        ("amid", 1, False),
        ("a sum right behind a skip", 1, True),
        ("a sum right behind a skip", 0, False),
        ("another view", 1, False),
        ("a concatenation", 1, True),
        ("one right behind a skip", 1, True),
        ("one of rows", 1, False),
        ("turned", 1, True),
    ],
)
def test_checkpoints_have_a_work_of_their_own_only_where_it_differs(name, j, expected):
    task = works(*(WRITING | SHARING)[name])[j]

    assert (task.checkpointed is not None) == expected
