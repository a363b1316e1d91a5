"""On several devices the engine gives what the plain module gives, and no access to memory is left to chance."""

from __future__ import annotations

import copy
import os
from dataclasses import astuple, replace
from functools import cache
from itertools import combinations, islice, product

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from tests.cover import cover
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
TRANSFERS = ["direct", "host"]
# If given, one case in so many of half a million: 101 takes a quarter of an hour.
STRIDE = int(os.environ.get("VIRTUAL_DEVICES_STRIDE", "0"))


@cache
def sample(first):
    """Cases, others for another ``first``: usually a few in which every pair of values is."""
    cases = islice(all_cases(), first, None, STRIDE or 499)
    return list(cases) if STRIDE else cover(cases, values_of)


def values_of(case):
    places = len(case.devices), len(set(case.devices))
    way = case.schedule, case.through
    return way, *places, case.m, *astuple(case.components), case.checkpoint, case.skips, case.transfer


def test_every_pair_of_values_is_in_a_sample():
    def pairs(cases):
        return {pair for case in cases for pair in combinations(enumerate(values_of(case)), 2)}

    assert pairs(sample(0)) == pairs(islice(all_cases(), 5, None, 101))


@pytest.mark.parametrize("components", FACTORIAL, ids=lambda components: components.label)
def test_every_combination_of_components_on_three_devices(components):
    wrong = []
    for checkpoint, skips, transfer in cover(product(CHECKPOINT_MODES, SKIPS, TRANSFERS)):
        wrong += problems(Case((0, 1, 2), 3, components, checkpoint, skips, transfer))
    assert wrong == []


@pytest.mark.parametrize(("schedule", "through"), WAYS[1:])
def test_every_schedule_on_three_devices(schedule, through):
    wrong = []
    for components, checkpoint, transfer in cover(product(switches(schedule)[::2], CHECKPOINT_MODES, TRANSFERS)):
        wrong += problems(Case((0, 1, 2), 3, components, checkpoint, "mixed", transfer, schedule, through))
    assert wrong == []


@pytest.mark.parametrize(("schedule", "through"), WAYS[1:])
def test_devices_that_stand_for_several_devices_of_a_schedule(schedule, through):
    wrong = []
    for devices, checkpoint, transfer in cover(product(((0, 1, 0), (2, 2), (1, 0, 0, 1)), CHECKPOINT_MODES, TRANSFERS)):
        wrong += problems(Case(devices, 4, Components(), checkpoint, "mixed", transfer, schedule, through))
    assert wrong == []


@pytest.mark.parametrize("transfer", TRANSFERS)
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


@pytest.mark.parametrize("transfer", TRANSFERS)
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
def test_devices_that_hold_several_partitions_or_one_layer(placement):
    wrong = []
    for components, checkpoint, transfer in cover(product(FACTORIAL[::3], CHECKPOINT_MODES, TRANSFERS)):
        wrong += problems(Case(placement, 4, components, checkpoint, "mixed", transfer))
    assert wrong == []


@pytest.mark.timeout(7200 if STRIDE else 600)
def test_all_numbers_of_devices_and_microbatches():
    assert [problem for case in sample(0) for problem in problems(case)] == []


@pytest.mark.timeout(7200 if STRIDE else 600)
@pytest.mark.parametrize(("first", "workers"), [(7, "always"), (3, "never")])
def test_an_exception_in_the_middle_whatever_the_combination(first, workers):
    wrong = []
    for number, case in enumerate(sample(first)):
        where, nth = ("forward", "recompute", "backward")[number % 3], number // 24 % case.m
        wrong += problems_after_an_exception(replace(case, workers=workers), where, block=number % 8, nth=nth)
    assert wrong == []


def test_a_small_batch_gives_fewer_microbatches():
    case = Case((0, 1), 8, Components(), "except_last", "nested", "direct")
    plain, pipe = step(model("nested"), batch(3)), case.pipe()
    found = step(pipe, batch(3, pipe.devices[0]))
    torch.testing.assert_close(found.gradients, plain.gradients)
    assert found.races == []


@pytest.mark.parametrize("transfer", TRANSFERS)
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
