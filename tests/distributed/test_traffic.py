"""What batches send: a batch like an earlier one sends the memory of its tensors, whatever was between the two."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench.distributed import Pipe
from tests.distributed.virtual import results_of

WIDTH = 5000
ACTIVATIONS = 4 * WIDTH * 4
"""Bytes that a step of four rows sends to the next process."""


def step(pipe, rows=4):
    pipe.step(torch.ones(rows, 2), torch.ones(rows, 2), functional.mse_loss)


@torch.no_grad()
def evaluate(pipe, rows=4):
    pipe(torch.ones(rows, 2))


def clip(pipe):
    pipe.clip_grad_norm_(1.0)


@pytest.mark.parametrize(
    "between",
    [
        lambda pipe: None,
        evaluate,
        lambda pipe: evaluate(pipe, 100),
        lambda pipe: step(pipe, 2),
        lambda pipe: (pipe.eval(), evaluate(pipe), pipe.train()),
    ],
    ids=["nothing", "evaluation", "large evaluation", "smaller batch", "evaluation mode"],
)
def test_a_step_sends_the_memory_of_its_tensors(between):
    assert_least_is_sent(step, between)


def test_to_clip_gradients_sends_numbers():
    assert_least_is_sent(lambda pipe: (step(pipe), clip(pipe)), lambda pipe: None)


def assert_least_is_sent(counted, between):
    def job(group):
        pipe, counts = Pipe(nn.Sequential(nn.Linear(2, WIDTH), nn.Linear(WIDTH, 2)), [1, 1], group=group, chunks=2), []
        for _ in range(4):
            before = group.world.sent_bytes[group.rank()]
            counted(pipe)
            counts.append(group.world.sent_bytes[group.rank()] - before)
            between(pipe)
        return counts

    for counts in results_of(2, job):
        assert all(ACTIVATIONS <= count < ACTIVATIONS + 3000 for count in counts), counts
