"""Tied weights on several devices: gradients of the plain module, one parameter on one device, and no races."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

from gpipe_bench import Components
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from tests.cover import cover
from tests.emulator.inside.pipelines import TRANSFERS, WAYS, Case, Mix, batch, model, step

WHERE = (0, 4, 7)
"""Blocks that have the tied weight."""


def tied():
    module = model("mixed")
    layers = [next(each for each in module[place] if isinstance(each, Mix)).linear for place in WHERE]
    for layer in layers[1:]:
        layer.weight = layers[0].weight
    return module, layers


@cache
def plain(rows):
    return step(tied()[0], batch(rows))


CASES = [
    Case(devices, m, Components(copy_streams=aside), checkpoint, "mixed", transfer, *way, workers)
    for devices, m, aside, checkpoint, transfer, way, workers in cover(
        product(
            ((0, 1, 2, 3), (0, 1, 0, 1), (2, 0, 0, 1), (3, 3, 3, 3)),
            (1, 4),
            (True, False),
            CHECKPOINT_MODES,
            TRANSFERS,
            WAYS,
            ("always", "never"),
        )
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_step_gives_what_the_plain_module_gives(case):
    module, layers = tied()
    pipe = case.pipe(module)
    weight = layers[0].weight
    assert all(layer.weight is weight for layer in layers)
    assert weight.device == pipe.devices[0]
    for _ in range(2):
        found = step(pipe, batch(case.rows, pipe.devices[0]), case.through)
        assert found.races == []
        torch.testing.assert_close(found.output, plain(case.rows).output)
        torch.testing.assert_close(found.gradients, plain(case.rows).gradients)
    assert all(layer.weight is weight for layer in layers)


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_evaluation_and_a_frozen_weight(schedule):
    module, layers = tied()
    layers[0].weight.requires_grad_(requires_grad=False)
    case = Case((0, 1, 2), 3, Components(), "except_last", "mixed", "direct", schedule, "step")
    pipe, x, expected = case.pipe(module), batch(case.rows), plain(case.rows).output
    with torch.no_grad():
        torch.testing.assert_close(pipe(x.to(pipe.devices[0])).cpu(), expected)
    pipe.step(x.to(pipe.devices[0]), x.to(pipe.devices[-1]), torch.nn.functional.mse_loss)
    assert layers[0].weight.grad is None
    assert layers[1].bias.grad is not None
