"""Across processes a pipeline gives what it gives in one process: loss, gradients, statistics, masks.

Ranks are threads here, see ``virtual.py``; a send lasts until it is received, so a wrong order would end in a time-out.
"""

from __future__ import annotations

import copy
import os
import random
from zlib import crc32

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpipe_bench import Components
from gpipe_bench.distributed import Pipe
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.skip import Namespace
from tests.distributed.virtual import results_of
from tests.engine.steps import DOUBLE, scheduled
from tests.engine.support import MODES, Peek, Pop, Stash
from tests.engine.test_mixed_values import make_model

MODELS = int(os.environ.get("MIXED_MODELS", "1"))


def ranks_of(schedule, partitions):
    return partitions // 2 if schedule in DOUBLE else partitions


def together(pipes, batches, loss=functional.mse_loss):
    """Losses and gradients of some steps, one process."""
    found = []
    for x, target in batches:
        pipes.zero_grad()
        value = pipes.step(x, target, loss)
        found.append((value, {name: each.grad for name, each in pipes.named_parameters()}))
    return found


def apart(ranks, make, batches, loss=functional.mse_loss):
    """The same across processes: the losses of each rank, and all gradients."""
    results = results_of(ranks, lambda group: together(make(group), batches, loss))
    merged = []
    for step in zip(*results, strict=True):
        values = [value for value, _ in step]
        assert all(torch.equal(value, values[0]) for value in values)
        merged.append((values[0], {name: grad for _, grads in step for name, grad in grads.items()}))
    return merged


def assert_equal(found, expected):
    for (value, grads), (value_there, grads_there) in zip(found, expected, strict=True):
        torch.testing.assert_close(value, value_there)
        assert grads.keys() == grads_there.keys()
        for name, grad in grads_there.items():
            if grad is None:
                assert grads[name] is None or not grads[name].any()
            else:
                assert torch.equal(grads[name], grad), name


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_values_of_every_kind(schedule, checkpoint):
    for number in range(MODELS):
        draw = random.Random(crc32(f"{schedule} {checkpoint} {number}".encode()))
        torch.manual_seed(draw.randrange(1000))
        width, rows = draw.choice([(2, 9), (3, 5), (64, 400)])
        model = make_model(draw, width)
        count = 4 if schedule in DOUBLE else draw.choice([2, 3, 4])
        cuts = sorted(draw.sample(range(1, len(model)), count - 1))
        balance = [end - start for start, end in zip([0, *cuts], [*cuts, len(model)], strict=True)]
        options = {"chunks": draw.choice([1, 2, 3, 5]), "checkpoint": checkpoint}
        x, table = torch.rand(2, rows, width, dtype=torch.float64).unbind()
        batch = draw.choice([x, (x, table), (x, torch.arange(rows) % 3, table)])
        batches = [(batch, torch.linspace(-1, 1, rows * width, dtype=torch.float64).view(rows, width))] * 2
        if not model(batch).requires_grad:
            continue
        expected = together(scheduled(copy.deepcopy(model), balance, schedule, workers="never", **options), batches)
        found = apart(
            ranks_of(schedule, count),
            lambda group: Pipe(copy.deepcopy(model), balance, schedule=schedule, group=group, **options),  # noqa: B023
            batches,
        )
        assert_equal(found, expected)


def unet():
    """Skips from every partition of four to the last one, and back between neighbours."""
    ends = [(0, 7), (1, 6), (2, 5), (3, 4)]
    layers = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(8)]
    for source, target in ends:
        namespace = Namespace()
        layers[source].append(Stash(namespace))
        layers[target].insert(0, Pop(namespace))
    return nn.Sequential(*layers).double()


def read_by_all():
    """Each of four partitions stashes what it makes, and the later ones read it."""
    spaces = [Namespace() for _ in range(4)]
    layers = []
    for j in range(4):
        reads = [Peek(spaces[k]) for k in range(j)]
        layers += [nn.Sequential(nn.Linear(3, 3), nn.Tanh(), *reads), Stash(spaces[j])]
    return nn.Sequential(*layers[:-1], nn.Linear(3, 3)).double()


@pytest.mark.parametrize("rows", [8, 3])
@pytest.mark.parametrize("make_model", [unet, read_by_all])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skips_in_all_directions(schedule, make_model, rows):
    torch.manual_seed(1)
    model, balance = make_model(), [2, 2, 2, 2]
    batches = [(torch.rand(rows, 3).double(), torch.rand(rows, 3).double())]
    expected = together(scheduled(copy.deepcopy(model), balance, schedule, chunks=8, workers="never"), batches)
    found = apart(
        ranks_of(schedule, 4),
        lambda group: Pipe(copy.deepcopy(model), balance, schedule=schedule, group=group, chunks=8),
        batches,
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_reader_may_have_a_copy_of_its_own(schedule):
    torch.manual_seed(1)
    model, options = read_by_all(), {"components": Components(shared=False), "chunks": 3}
    batches = [(torch.rand(6, 3).double(), torch.rand(6, 3).double())]
    expected = together(scheduled(copy.deepcopy(model), [2] * 4, schedule, workers="never", **options), batches)
    found = apart(
        ranks_of(schedule, 4),
        lambda group: Pipe(copy.deepcopy(model), [2] * 4, schedule=schedule, group=group, **options),
        batches,
    )
    assert_equal(found, expected)


def convolutions():
    torch.manual_seed(2)
    blocks = [nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.LazyLinear(2)).double()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v"])
def test_shapes_change_from_batch_to_batch_and_batches_are_uneven(schedule):
    model, balance = convolutions(), [1, 1, 2, 2]
    model[-1] = nn.Linear(3 * 8 * 8, 2).double()
    model.insert(4, nn.AdaptiveAvgPool2d(8))
    balance = [1, 1, 2, 3]
    shapes = [(8, 3, 8, 8), (7, 3, 8, 8), (16, 3, 12, 12), (3, 3, 8, 8), (8, 3, 8, 8)]
    batches = [
        (torch.rand(shape).double().to(memory_format=torch.channels_last), torch.rand(shape[0], 2).double())
        for shape in shapes
    ]
    options = {"chunks": 4, "deferred_batch_norm": True, "checkpoint": "always"}
    one = scheduled(copy.deepcopy(model), balance, schedule, workers="never", **options)
    expected = together(one, batches)
    pipes = {}

    def make(group):
        pipes[group.rank()] = Pipe(copy.deepcopy(model), balance, schedule=schedule, group=group, **options)
        return pipes[group.rank()]

    assert_equal(apart(ranks_of(schedule, 4), make, batches), expected)
    buffers = {name: value for pipe in pipes.values() for name, value in pipe.named_buffers()}
    torch.testing.assert_close(buffers, dict(one.named_buffers()), rtol=0, atol=0)


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_frozen_partitions_and_a_loss_over_labels(schedule, checkpoint):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(6))).double()
    model[0].requires_grad_(requires_grad=False)
    model[3].requires_grad_(requires_grad=False)
    batches = [(torch.rand(7, 5).double(), torch.tensor([0, 4, -100, 2, -100, -100, -100]))]
    balance, options = [1, 2, 2, 1], {"chunks": 3, "checkpoint": checkpoint}
    one = scheduled(copy.deepcopy(model), balance, schedule, workers="never", **options)
    expected = together(one, batches, functional.cross_entropy)
    found = apart(
        ranks_of(schedule, 4),
        lambda group: Pipe(copy.deepcopy(model), balance, schedule=schedule, group=group, **options),
        batches,
        functional.cross_entropy,
    )
    assert_equal(found, expected)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_v"])
def test_evaluation_and_outputs(schedule):
    model, x = unet(), torch.rand(7, 3).double()
    last = 0 if schedule == "zb_v" else 3

    def job(group):
        pipe = Pipe(copy.deepcopy(model), [2, 2, 2, 2], schedule=schedule, group=group, chunks=3)
        with torch.no_grad():
            evaluated = pipe(x if group.rank() == 0 else None)
        _, output = pipe.step(x, x, functional.mse_loss, return_output=True)
        return evaluated, output

    results = results_of(ranks_of(schedule, 4), job)
    for rank, (evaluated, output) in enumerate(results):
        if rank == last:
            torch.testing.assert_close([evaluated, output], [model(x).detach()] * 2)
        else:
            assert evaluated is output is None


def test_a_checkpointed_forward_pass_runs_exactly_twice():
    calls = []

    class Counts(nn.Linear):
        def forward(self, x):
            calls.append(1)
            return super().forward(x)

    model = nn.Sequential(*(Counts(3, 3) for _ in range(4)))
    x = torch.rand(8, 3)

    def job(group):
        Pipe(copy.deepcopy(model), [1] * 4, schedule="zb_v", group=group, chunks=4, checkpoint="always").step(
            x, x, functional.mse_loss
        )

    results_of(2, job)
    assert len(calls) == 2 * 4 * 4


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1", "zb_v"])
def test_autocast_around_a_step(schedule, checkpoint):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(4)))
    batches = [(torch.rand(7, 5), torch.rand(7, 5))]
    options = {"chunks": 3, "checkpoint": checkpoint}

    def loss(output, target):
        assert output.dtype == torch.bfloat16
        return functional.mse_loss(output.float(), target)

    def half(pipe):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return together(pipe, batches, loss)

    expected = half(scheduled(copy.deepcopy(model), [1] * 4, schedule, workers="never", **options))

    def job(group):
        return half(Pipe(copy.deepcopy(model), [1] * 4, schedule=schedule, group=group, **options))

    results = results_of(ranks_of(schedule, 4), job)
    merged = {name: grad for ((_, grads),) in results for name, grad in grads.items()}
    assert_equal([(results[0][0][0], merged)], expected)
