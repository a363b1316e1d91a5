"""On several devices the engine gives what the plain module gives, and no access to memory is left to chance."""

from __future__ import annotations

import copy
import os
from dataclasses import astuple
from functools import cache
from itertools import combinations, cycle, product

import pytest
import torch
from torch import nn

from gpipe_bench import Components, GPipe
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from tests.cover import cover
from tests.emulator.inside.pipelines import (
    DOUBLE,
    SKIPS,
    TRANSFERS,
    WAYS,
    Case,
    batch,
    even_balance,
    model,
    problems,
    problems_after_an_exception,
    some_cases,
    step,
    switches,
)

# If given, so many random cases for each schedule and placement; usually a few in which every pair of values is.
EACH = int(os.environ.get("VIRTUAL_DEVICES_CASES", "0"))
PLACES = ((0, 1, 2), (0, 1, 0), (2, 2))
COMBINATIONS = [
    *(Case(devices, 4, *chosen) for devices, *chosen in cover(
        product((*PLACES, tuple(range(8))), Components.factorial(), CHECKPOINT_MODES, SKIPS, TRANSFERS)
    )),
    *(Case(devices, 4, components, checkpoint, "mixed", transfer, *way)
      for devices, components, checkpoint, transfer, way in cover(
        product((*PLACES, (1, 0, 0, 1)), switches("gpipe")[::2], CHECKPOINT_MODES, TRANSFERS, WAYS[1:])
    )),
]  # fmt: skip
"""Every combination of components, and every schedule, on devices that hold one or several partitions."""


@cache
def sample(seed):
    """Random cases, others for another ``seed``, and where one of its blocks raises."""
    phases = cycle(("forward", "recompute", "backward"))
    cases = [*zip(some_cases(seed, EACH or 8), phases, strict=False)]
    return cases if EACH else cover(cases, lambda one: (*values_of(one[0]), one[1]))


def values_of(case):
    places = len(case.devices), len(set(case.devices))
    way = case.schedule, case.through
    return way, *places, case.m, *astuple(case.components), case.checkpoint, case.skips, case.transfer, case.workers


def test_every_pair_of_values_is_in_a_sample():
    def pairs(cases):
        return {pair for case in cases for pair in combinations(enumerate(values_of(case)), 2)}

    assert pairs(case for case, _ in sample(0)) >= pairs(some_cases(5, 20))


@pytest.mark.parametrize("case", COMBINATIONS, ids=str)
def test_a_step_gives_what_the_plain_module_gives(case):
    assert problems(case) == []


READ_BY_MANY = [
    Case(devices, 3, Components(portals=portals, shared=shared), checkpoint, "many", transfer, *way)
    for devices, way, portals, shared, checkpoint, transfer in cover(
        product(
            ((0, 1, 2), (0, 1, 0, 1), (1, 0, 0, 1), (0, 1, 2, 3)), WAYS, (True, False), (True, False), CHECKPOINT_MODES,
            TRANSFERS,
        ),
        together=3,
    )
]  # fmt: skip


@pytest.mark.parametrize("case", READ_BY_MANY, ids=str)
def test_a_skip_that_many_read_is_on_its_device_when_it_is_read(case):
    assert problems(case) == []


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


@pytest.mark.timeout(7200 if EACH else 600)
def test_all_numbers_of_devices_and_microbatches():
    assert [problem for case, _ in sample(0) for problem in problems(case)] == []


@pytest.mark.timeout(7200 if EACH else 600)
def test_an_exception_in_the_middle_whatever_the_combination():
    wrong = []
    for number, (case, where) in enumerate(sample(7)):
        wrong += problems_after_an_exception(case, where, block=number % 8, nth=number // 24 % case.m)
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
