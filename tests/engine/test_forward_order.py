"""The order in which tasks are issued, by whom, and that tasks of a cycle do run at the same time."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.schedules.cycles import clock_cycles, microbatch_major
from tests.engine.support import FACTORIAL, Watch, crossing_model, label, numbered, on_cpu, probe_pipe

CLOCK_CYCLES = """
    F0,0
    F1,0 F0,1
    F2,0 F1,1 F0,2
    F3,0 F2,1 F1,2
         F3,1 F2,2
              F3,2
"""
MICROBATCH_MAJOR = """
    F0,0 F0,1 F0,2
    F1,0 F1,1 F1,2
    F2,0 F2,1 F2,2
    F3,0 F3,1 F3,2
"""


def forward(m=4, n=3, **switches):
    """What an observer sees of a forward pass, and in which thread each layer ran."""
    threads = {}
    pipe = probe_pipe(n, [], threads, chunks=m, components=Components(**switches))
    with pipe.observe(watch := Watch()):
        pipe(numbered(m))
    return watch, threads


def test_clock_cycles_run_one_after_the_other():
    watch, _ = forward()
    order = watch.order("F").split()
    # within a cycle the threads decide
    for line in CLOCK_CYCLES.split("\n"):
        cycle = line.split()
        assert sorted(order[: len(cycle)]) == sorted(cycle)
        del order[: len(cycle)]
    assert order == []


def test_without_clock_cycles_each_microbatch_goes_through_all_partitions():
    watch, _ = forward(clock_cycle=False)
    assert watch.order("F").split() == MICROBATCH_MAJOR.split()


def test_the_pictures_are_those_of_the_schedule():
    def names(cycles):
        return [f"F{i},{j}" for cycle in cycles for i, j in cycle]

    assert CLOCK_CYCLES.split() == names(clock_cycles(4, 3))
    assert MICROBATCH_MAJOR.split() == names(microbatch_major(4, 3))


def test_an_observer_is_told_in_the_thread_that_issues_the_task():
    watch, threads = forward()
    assert {seen.name: seen.thread for seen in watch.seen} == threads


class Meet(nn.Module):
    """Waits for the other layer of its cycle: only if both run at the same time does either go on."""

    def __init__(self, barrier: threading.Barrier, turn: int) -> None:
        super().__init__()
        self.barrier, self.turn = barrier, turn
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        if int(x.flatten()[0].detach()) == self.turn and not self.barrier.broken:
            self.barrier.wait(timeout=30)
        return x * self.weight


@pytest.mark.parametrize("components", [each for each in FACTORIAL if each.clock_cycle], ids=label)
def test_tasks_of_one_cycle_run_at_the_same_time(components):
    barrier = threading.Barrier(3)
    layers = [Meet(barrier, turn) for turn in (2, 1, 0)]
    pipe = on_cpu(nn.Sequential(*layers), [1, 1, 1], chunks=3, components=components, checkpoint="never")
    torch.testing.assert_close(pipe(numbered(3)), numbered(3))


def test_copies_and_portals_of_a_cycle_come_before_its_tasks():
    pipe = on_cpu(crossing_model(), [2, 2, 3], chunks=2, transfer="host", components=Components(clock_cycle=False))
    with pipe.observe(watch := Watch()):
        pipe(torch.zeros(2, 3, dtype=torch.float64))
    # the outer skip goes straight from partition 0 to 2, the inner one from 1 to 2
    assert watch.order() == "F0,0 C0,1 F0,1 P0,2 P0,2 C0,2 F0,2 F1,0 C1,1 F1,1 P1,2 P1,2 C1,2 F1,2"
