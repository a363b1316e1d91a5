"""On several devices the engine gives what the plain module gives, and no access to memory is left to chance."""

from __future__ import annotations

import copy
import dataclasses
import os
from itertools import islice

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.schedule import CHECKPOINT_MODES
from tests.emulator.inside.pipelines import (
    DOUBLE,
    SKIPS,
    WAYS,
    Case,
    all_cases,
    batch,
    even_balance,
    model,
    problems,
    problems_after_an_exception,
    step,
    switches,
)

FACTORIAL = list(Components.factorial())
# One case in so many of half a million; 101 takes a quarter of an hour.
USUAL = 1499
STRIDE = int(os.environ.get("VIRTUAL_DEVICES_STRIDE", USUAL))


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("components", FACTORIAL, ids=lambda components: components.label)
def test_every_combination_of_components_on_three_devices(components, transfer):
    wrong = []
    for checkpoint in CHECKPOINT_MODES:
        for skips in SKIPS:
            wrong += problems(Case((0, 1, 2), 3, components, checkpoint, skips, transfer))
    assert wrong == []


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize(("schedule", "through"), WAYS[1:])
def test_every_schedule_on_three_devices(schedule, through, transfer):
    wrong = []
    for components in switches(schedule)[::3]:
        for checkpoint in CHECKPOINT_MODES:
            wrong += problems(Case((0, 1, 2), 3, components, checkpoint, "mixed", transfer, schedule, through))
    assert wrong == []


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize(("schedule", "through"), WAYS[1:])
def test_devices_that_stand_for_several_devices_of_a_schedule(schedule, through, transfer):
    wrong = []
    for devices in ((0, 1, 0), (2, 2), (1, 0, 0, 1)):
        for checkpoint in CHECKPOINT_MODES:
            wrong += problems(Case(devices, 4, Components(), checkpoint, "mixed", transfer, schedule, through))
    assert wrong == []


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("m", [1, 2, 3, 5])
def test_three_and_four_partitions_on_each_device(m, transfer):
    wrong = []
    for v in (3, 4):
        devices = ["virtual:4", "virtual:5"]
        options = {"chunks": m, "schedule": "interleaved", "transfer": transfer, "checkpoint": "except_last"}
        pipe = GPipe(model("mixed"), even_balance(2 * v), devices=devices, **options)
        case = Case((4, 5), m, Components(), "except_last", "mixed", transfer, "interleaved", "step")
        wrong += problems(case, pipe)
    assert wrong == []


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize(("schedule", "through"), WAYS)
def test_the_cpu_beside_accelerators(schedule, through, transfer):
    places = ["cpu", "virtual:1"] if schedule in DOUBLE else ["cpu", "virtual:1", "virtual:2", "cpu"]
    case = Case((0,) * len(places), 3, Components(), "except_last", "mixed", transfer, schedule, through)
    options = {"chunks": case.m, "transfer": transfer, "schedule": schedule}
    pipe = GPipe(model(case.skips), even_balance(case.n), devices=places, **options)
    assert problems(case, pipe) == []


def test_the_step_of_the_papers_executor():
    case = Case((0, 1, 2), 3, Components(), "except_last", "mixed", "direct", through="step")
    assert problems(case) == []


@pytest.mark.parametrize("placement", [(0, 1, 0), (2, 2), tuple(range(8))], ids=str)
@pytest.mark.parametrize("components", FACTORIAL[::3], ids=lambda components: components.label)
def test_devices_that_hold_several_partitions_or_one_layer(components, placement):
    wrong = []
    for checkpoint in CHECKPOINT_MODES:
        for transfer in ("direct", "host"):
            wrong += problems(Case(placement, 4, components, checkpoint, "mixed", transfer))
    assert wrong == []


@pytest.mark.timeout(7200 if STRIDE < USUAL else 600)
def test_all_numbers_of_devices_and_microbatches():
    wrong = [problem for case in islice(all_cases(), 0, None, STRIDE) for problem in problems(case)]
    assert wrong == []


@pytest.mark.timeout(7200 if STRIDE < USUAL else 600)
def test_an_exception_in_the_middle_whatever_the_combination():
    wrong = []
    for number, case in enumerate(islice(all_cases(), 7, None, 2 * STRIDE)):
        where = ("forward", "recompute", "backward")[number % 3]
        wrong += problems_after_an_exception(case, where, block=number % 8, nth=number // 24 % case.m)
    assert wrong == []


@pytest.mark.timeout(7200 if STRIDE < USUAL else 600)
def test_tasks_in_the_calling_thread():
    wrong = []
    for number, case in enumerate(islice(all_cases(), 3, None, 2 * STRIDE)):
        alone = dataclasses.replace(case, workers="never")
        wrong += problems(alone)
        wrong += problems_after_an_exception(alone, ("forward", "recompute", "backward")[number % 3], number % 8, 0)
    assert wrong == []


def test_a_small_batch_gives_fewer_microbatches():
    case = Case((0, 1), 8, Components(), "except_last", "nested", "direct")
    plain, pipe = step(model("nested"), batch(3)), case.pipe()
    found = step(pipe, batch(3, pipe.devices[0]))
    torch.testing.assert_close(found.gradients, plain.gradients)
    assert found.races == []


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("placement", [(0, 1, 2), (0, 1, 1)], ids=str)
def test_layers_that_are_replaced_between_batches(placement, transfer):
    case = Case(placement, 3, Components(), "always", "mixed", transfer)
    pipe = case.pipe()
    x = batch(case.rows, pipe.devices[0])
    before = step(pipe, x)
    for index in (0, 4, 7):
        pipe[index] = copy.deepcopy(pipe[index])
        for parameter in pipe[index].parameters():
            parameter.data.mul_(-1)
    found = step(pipe, x)
    plain = step(nn.Sequential(*(copy.deepcopy(layer).cpu() for layer in pipe)), x.cpu())
    torch.testing.assert_close(found.output, plain.output)
    torch.testing.assert_close(found.gradients, plain.gradients)
    assert not torch.allclose(found.output, before.output)
    assert found.races == []
    pipe[4] = copy.deepcopy(pipe[0])
    with pytest.raises(ValueError, match="got '4' on virtual:0 in a partition on virtual:1; move it"):
        pipe(x)
