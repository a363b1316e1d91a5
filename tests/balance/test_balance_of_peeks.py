"""Models whose layers read a skip many times can be balanced, by each of the three ways."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from gpipe_bench.balance import balance_by_simulation, balance_by_size, balance_by_time
from gpipe_bench.balance.layers import stages
from tests.engine.support import Mix, Peek, Pop, Stash

WAYS = {
    "time": balance_by_time,
    "size": balance_by_size,
    "simulation": partial(balance_by_simulation, profile="p40"),
}


def model() -> nn.Sequential:
    return nn.Sequential(Mix(), Stash(), Mix(), Peek(), Mix(), Peek(), Peek(), Mix())


@pytest.mark.parametrize("way", WAYS)
def test_a_balance_is_found(way):
    balance = WAYS[way](3, model(), torch.rand(2, 3))
    assert len(balance) == 3
    assert sum(balance) == 8


@pytest.mark.parametrize(
    ("last", "reads", "held"),
    [
        (Peek, [0, 0, 0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1, 0]),
        (Pop, [0, 0, 0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 1, 1, 0]),
    ],
)
def test_a_skip_is_held_until_its_last_reader(last, reads, held):
    layers = model()
    layers[6] = last()
    found = []
    for stage in stages(layers, torch.rand(2, 3), torch.device("cpu")):
        stage.forward()
        stage.idle().forward()
        found.append((len(stage.read), len(stage._skips)))
    assert found == [*zip(reads, held, strict=True)]
