"""On several devices the engine gives what the plain module gives, and no access to memory is left to chance."""

from __future__ import annotations

import copy
import dataclasses
import os

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.schedule import CHECKPOINT_MODES
from tests.virtual_devices.inside.pipelines import (
    SKIPS,
    Case,
    all_cases,
    batch,
    model,
    problems,
    problems_after_an_exception,
    step,
)

FACTORIAL = list(Components.factorial())
# One case in so many; 1 runs all of them, which takes about two hours.
STRIDE = int(os.environ.get("VIRTUAL_DEVICES_STRIDE", "499"))


@pytest.mark.parametrize("backward", ["autograd", "scheduled"])
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("components", FACTORIAL, ids=lambda components: components.label)
def test_every_combination_of_components_on_three_devices(components, transfer, backward):
    wrong = []
    for checkpoint in CHECKPOINT_MODES:
        for skips in SKIPS:
            wrong += problems(Case((0, 1, 2), 3, components, checkpoint, skips, transfer, backward))
    assert wrong == []


@pytest.mark.parametrize("placement", [(0, 1, 0), (2, 2), tuple(range(8))], ids=str)
@pytest.mark.parametrize("components", FACTORIAL[::3], ids=lambda components: components.label)
def test_devices_that_hold_several_partitions_or_one_layer(components, placement):
    wrong = []
    for checkpoint in CHECKPOINT_MODES:
        for transfer in ("direct", "host"):
            wrong += problems(Case(placement, 4, components, checkpoint, "mixed", transfer))
    assert wrong == []


@pytest.mark.timeout(7200 if STRIDE < 499 else 120)
def test_all_numbers_of_devices_and_microbatches():
    cases = list(all_cases())
    wrong = [problem for case in cases[::STRIDE] for problem in problems(case)]
    assert wrong == []


@pytest.mark.timeout(7200 if STRIDE < 499 else 120)
def test_an_exception_in_the_middle_whatever_the_combination():
    wrong = []
    for number, case in enumerate(list(all_cases())[7 :: 2 * STRIDE]):
        where = ("forward", "recompute", "backward")[number % 3]
        wrong += problems_after_an_exception(case, where, block=number % 8, nth=number // 24 % case.m)
    assert wrong == []


@pytest.mark.timeout(7200 if STRIDE < 499 else 120)
def test_tasks_in_the_calling_thread():
    wrong = []
    for number, case in enumerate(list(all_cases())[3 :: 2 * STRIDE]):
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
