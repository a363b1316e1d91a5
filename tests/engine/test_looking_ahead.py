"""Partitions on the CPU look one clock-cycle ahead in the scheduled mode, and nothing but time depends on it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

from gpipe_bench.errors import RandomnessError
from tests.engine.support import MODES, numbered, on_cpu


class Paced(nn.Module):
    """Tells which micro-batches it has begun; the first one waits until ``go``."""

    def __init__(self, go: Callable[[], object]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.begun: dict[int, threading.Event] = {i: threading.Event() for i in range(4)}
        self.go = go

    def forward(self, x):
        i = int(x.flatten()[0].detach())
        self.begun[i].set()
        if i == 0:
            self.go()
        return x * self.weight


def paced(go: Callable[[Paced], object], **options) -> bool:
    """What ``go`` says, called with the first partition while the last has its first task."""
    said = []
    first = Paced(lambda: None)
    last = Paced(lambda: said.append(go(first)))
    pipe = on_cpu(nn.Sequential(first, last), [1, 1], chunks=4, workers="always", **options)
    torch.testing.assert_close(pipe(numbered(4)), numbered(4))
    return said == [True]


def begins(i: int, within_s: float) -> Callable[[Paced], bool]:
    return lambda layer: layer.begun[i].wait(timeout=within_s)


@pytest.mark.parametrize("checkpoint", MODES)
def test_on_the_cpu_scheduled_partitions_do_not_wait_for_the_slowest_of_a_cycle(checkpoint):
    assert paced(begins(2, 30), backward="scheduled", checkpoint=checkpoint)


def test_but_they_look_no_further_than_the_next_cycle():
    assert not paced(begins(3, 0.3), backward="scheduled")


def test_where_the_order_of_autograd_hangs_on_it_they_do_wait():
    assert not paced(begins(2, 0.3), backward="autograd")


class DrawsLater(nn.Module):
    """Draws from its second micro-batch on; the first one takes its time."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.pause_s = pause_s

    def forward(self, x):
        if int(x.flatten()[0].detach()) == 0:
            time.sleep(self.pause_s)
            return x * self.weight
        return nn.functional.dropout(x * self.weight)


def drawn(drawing: int, pause_s: float, workers: str, checkpoint: str) -> tuple[list[list[float]], str]:
    """Which values of the first batch are dropped, and how its backward pass ends."""
    torch.manual_seed(0)
    layers = [nn.Identity(), nn.Identity()]
    layers[drawing] = DrawsLater(pause_s)
    options = {"backward": "scheduled", "workers": workers, "checkpoint": checkpoint}
    output = on_cpu(nn.Sequential(*layers), [1, 1], chunks=4, **options)(numbered(4).expand(4, 32).clone())
    try:
        output.sum().backward()
    except RandomnessError:
        return (output == 0).tolist(), "refused"
    return (output == 0).tolist(), "trained"


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("drawing", [0, 1])
def test_random_numbers_do_not_depend_on_which_task_had_ended_when_the_next_was_launched(drawing, checkpoint):
    expected = drawn(drawing, 0, "never", checkpoint)
    assert expected[1] == ("trained" if checkpoint == "never" else "refused")
    for pause_s in (0, 0.05):
        assert drawn(drawing, pause_s, "always", checkpoint) == expected
