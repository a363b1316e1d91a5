"""Tied weights count once, with a copy and its gradient in each later partition that has them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gpipe_bench.simulator import simulate

WORDS, WIDTH = 1000, 64
WEIGHT_BYTES = 4 * WORDS * WIDTH
STATES = 2
"""Of Adam, each as large as the weight."""


def peaks(balance, *, tied=True, frozen=False, schedule="1f1b"):
    """Allocated bytes of each device."""
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    embedding.weight.requires_grad_(not frozen)
    if tied:
        head.weight = embedding.weight
    else:
        head.weight.requires_grad_(not frozen)
    layers = nn.Sequential(embedding, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), head)
    run = simulate(
        layers, balance=balance, batch_size=32, chunks=4, sample=torch.zeros(1, dtype=torch.long), profile="h100",
        schedule=schedule, optimizer="adam",
    )  # fmt: skip
    return [round(device.peak_allocated_gib * 2**30) for device in run.devices]


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_a_later_partition_has_no_state_of_the_optimizer(schedule):
    tied, untied = (peaks([1, 1, 2], tied=each, schedule=schedule) for each in (True, False))
    assert [one - other for one, other in zip(untied, tied, strict=True)] == [0, 0, STATES * WEIGHT_BYTES]


def test_within_a_partition_there_is_one_weight():
    """Its gradient and its states count once, too."""
    tied, untied = (peaks([4], tied=each)[0] for each in (True, False))
    assert untied - tied == pytest.approx((2 + STATES) * WEIGHT_BYTES, rel=0.01)


def test_a_frozen_one_is_copied_alone():
    assert peaks([2, 2], frozen=True) == peaks([2, 2], frozen=True, tied=False)
