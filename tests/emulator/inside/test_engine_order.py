"""The order of recomputations and backward passes on each device, whatever the host's threads do first.


R3 is the recomputation of micro-batch 3, B3 its backward pass.
"""

from __future__ import annotations

import threading
from collections import Counter
from itertools import product

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe, is_recomputing
from gpipe_bench.schedules import SCHEDULES, Action, named_schedule, with_recomputation
from gpipe_bench.schedules.cycles import checkpoint_stop
from tests.cover import cover
from tests.emulator.bed.behaviour import jitter
from tests.emulator.inside.pipelines import WIDTH, Case, Watch, batch, mean_score, targets
from tests.engine.support import Identity

N, M = 4, 4
RUNS = 12
DEPTH = 60
ORDERED = {
    "always": "R3 B3 R2 B2 R1 B1 R0 B0",
    "except_last": "B3 R2 B2 R1 B1 R0 B0",
    "never": "B3 B2 B1 B0",
}
# With Fork and Join; and the schedule of GPipe, which needs neither.
ORDERING = [
    {"components": Components()},
    {"components": Components(copy_streams=False, portals=False)},
    {"components": Components(clock_cycle=False)},
    {"schedule": "gpipe"},
]
KIND = {"forward": "F", "recompute": "R", "backward": "B", "backward_inputs": "I", "backward_weights": "W"}


class Probe(nn.Module):
    """Notes R and B of the tasks of its partition; micro-batch i holds i."""

    def __init__(self, j, log, lock):
        super().__init__()
        self.j, self.log, self.lock = j, log, lock
        self.weight = nn.Parameter(torch.ones(1))

    def note(self, what):
        with self.lock:
            self.log.append((self.j, what))

    def forward(self, x):
        i = int(x[0, 0])
        if is_recomputing():
            self.note(f"R{i}")
        return Identity.apply(x * self.weight, lambda: self.note(f"B{i}"))


class First(Probe):
    """Takes a batch that needs no gradient; E3 is the end of B3, many nodes later."""

    def forward(self, x):
        i = int(x[0, 0])
        value = Identity.apply(x * self.weight, lambda: self.note(f"E{i}"))
        for _ in range(DEPTH):
            value = value * 1
        return super().forward(value)


def name(options):
    return f"{options.get('schedule')}-{options.get('components', Components()).label}"


def orders(checkpoint, runs=RUNS, *, first=Probe, tokens=False, devices=N, **options):
    """The order in each partition, in each of some runs with random delays of the host."""
    log, lock = [], threading.Lock()
    layers = nn.Sequential(*((Probe if j else first)(j, log, lock) for j in range(N)))
    places = [f"virtual:{j * devices // N}" for j in range(N)]
    pipe = GPipe(layers, [1] * N, devices=places, chunks=M, checkpoint=checkpoint, **options)
    x = torch.arange(M if tokens else float(M)).repeat_interleave(WIDTH).reshape(M, WIDTH).to(places[0])
    found = []
    for seed in range(runs):
        with jitter(seed, 300 if seed else 0):
            output = pipe(x)
            log.clear()
            output.sum().backward()
        found.append([" ".join(what for place, what in log if place == j) for j in range(N)])
    return found


@pytest.mark.parametrize("checkpoint", ORDERED)
@pytest.mark.parametrize("options", ORDERING, ids=name)
def test_every_device_goes_from_the_last_microbatch_to_the_first(checkpoint, options):
    assert orders(checkpoint, **options) == [[ORDERED[checkpoint]] * N] * RUNS


@pytest.mark.parametrize(
    ("checkpoint", "place", "devices", "tokens"),
    cover(product(ORDERED, range(len(ORDERING)), [N, 2], [False, True]), together=3),
)
def test_so_does_the_partition_whose_inputs_need_no_gradient(checkpoint, place, devices, tokens):
    expected = " ".join(f"{what} E{what[1]}" if what[0] == "B" else what for what in ORDERED[checkpoint].split())
    found = orders(checkpoint, 2, first=First, tokens=tokens, devices=devices, **ORDERING[place])
    assert [order[0] for order in found] == [expected] * 2


@pytest.mark.parametrize("schedule", [None, "gpipe"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_each_device_recomputes_right_before_it_needs_it_without_early_recomputation(checkpoint, schedule):
    found = orders(checkpoint, components=Components(early_recompute=False), schedule=schedule)
    assert found == [[ORDERED[checkpoint]] * N] * RUNS


def test_without_fork_and_join_the_last_device_recomputes_everything_first():
    found = Counter(order[-1] for order in orders("always", components=Components(fork_join=False)))
    assert found == {"R3 R2 R1 R0 B3 B2 B1 B0": RUNS}


def test_without_fork_and_join_every_task_still_runs_once_and_recomputes_before_it_goes_back():
    # Which order the other devices take is a race between the host's threads.
    for run in orders("always", components=Components(fork_join=False)):
        for order in run:
            steps = order.split()
            assert sorted(steps) == sorted(ORDERED["always"].split())
            assert all(steps.index(f"R{i}") < steps.index(f"B{i}") for i in range(M))


@pytest.mark.parametrize("checkpoint", ORDERED)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_device_takes_its_actions_in_the_order_of_the_schedule(schedule, checkpoint):
    case = Case((0, 1, 2), 5, Components(), checkpoint, "mixed", "direct", schedule, "step")
    plain = named_schedule(schedule, case.m, case.n, len(case.devices))
    expected = with_recomputation(plain, checkpoint_stop(checkpoint, case.m))
    pipe = case.pipe()
    x = batch(case.rows, pipe.devices[0]).requires_grad_()
    for seed in range(3):
        watch = Watch()
        with jitter(seed, 200 if seed else 0), pipe.observe(watch):
            pipe.step(x, targets(pipe, case.rows), mean_score)
        found = [[], [], []]
        for task, _ in watch.seen:
            if task.kind in KIND:
                found[task.device.index].append(Action(KIND[task.kind], task.microbatch, task.partition))
        assert [tuple(row) for row in found] == list(expected.devices)


class Asks(nn.Module):
    """Asks, in the host's thread, when its first task begins; tells which micro-batches it has begun."""

    def __init__(self, ask=lambda: None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.begun = [threading.Event() for _ in range(M)]
        self.ask = ask

    def forward(self, x):
        i = int(x[0, 0])
        self.begun[i].set()
        if i == 0:
            self.ask()
        return x * self.weight


def test_no_task_is_issued_before_the_cycle_before_has_been():
    """What a copy stream waits for would otherwise be not this task but the next."""
    first, said = Asks(), []
    last = Asks(lambda: said.append((first.begun[1].wait(30), first.begun[2].wait(0.3))))
    places = ["virtual:0", "virtual:1"]
    pipe = GPipe(nn.Sequential(first, last), [1, 1], devices=places, chunks=M)
    pipe(torch.arange(float(M)).repeat_interleave(WIDTH).reshape(M, WIDTH).to(places[0])).sum().backward()
    assert said[0] == (True, False)
