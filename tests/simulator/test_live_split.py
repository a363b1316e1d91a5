"""I and W: what tensors hold in the engine on the CPU, task by task, and what the traced requests say."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpipe_bench.models.table import MODELS as SUITE
from tests.engine.support import MODES
from tests.simulator.split_replay import engine_points, replayed_points
from tests.simulator.support import TOLERANCE, examples
from tests.simulator.test_live_models import MODELS, ROWS, One, Residual, Two
from tests.simulator.test_live_random import LAYERS, LENGTH, WIDTH, models

# Losses are no tensors of the simulation.
NUMBERS = 128


class Twice(nn.Module):
    """Uses its weight twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(torch.tanh(self.linear(x)))


class Added(nn.Module):
    """The gradient of its output is that of its input, and W needs it, too."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x):
        return x + self.bias


MORE = {
    "a weight that is used twice": (lambda: [nn.Linear(64, 64), Twice(), nn.Linear(64, 64)], ROWS, [1, 2]),
    "gradients that are passed on": (lambda: [Added(), Added(), nn.Tanh(), Added(), Added()], ROWS, [1, 3, 1]),
    "no weights": (lambda: [nn.Linear(64, 64), nn.Tanh(), Two(), One(), nn.Linear(64, 64)], ROWS, [1, 3, 1]),
    "one partition": (lambda: [nn.Linear(64, 64), nn.Tanh(), Residual()], ROWS, [3]),
    "large": (lambda: [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)] * 2, (64, 64), [2, 2, 2]),
}


def compare(module, x, balance, rel=TOLERANCE, **options):
    real = engine_points(module, x, balance, options)
    simulated = replayed_points(module, x, balance, **options)
    # The engine does not report actions that have nothing to do.
    assert real.keys() <= simulated.keys()
    batch_norm = any(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    for action, (begin, peak) in real.items():
        found, most = simulated[action]
        # The engine copies inputs of checkpoints before F and R begin.
        assert action[0] in "FR" or found == pytest.approx(begin, abs=NUMBERS), action
        # On accelerators W makes the gradient of the input of a batch norm again (cuDNN), on the CPU it does not.
        expected = max(peak, most) if batch_norm and action[0] == "W" else peak
        assert most == pytest.approx(expected, rel=rel, abs=NUMBERS), action


@pytest.mark.parametrize("name", [*MODELS, *MORE])
@pytest.mark.parametrize(("checkpoint", "m"), [("always", 2), ("except_last", 3), ("never", 3)])
def test_every_task_holds_what_it_does_in_the_engine(name, checkpoint, m):
    make, shape, balance = (MODELS | MORE)[name]
    module = nn.Sequential(*map(copy.deepcopy, make()))
    compare(module, torch.ones(shape), balance, chunks=m, checkpoint=checkpoint, schedule="zb_h1")


@pytest.mark.parametrize("schedule", ["zb_h2", "zb_v", "v_half"])
def test_every_schedule_holds_what_the_engine_does(schedule):
    module = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())))
    compare(module, torch.ones(ROWS), [3, 1, 2, 2], chunks=4, checkpoint="except_last", schedule=schedule)


@pytest.mark.parametrize("tokens", [False, True], ids=["numbers", "tokens"])
@pytest.mark.parametrize("checkpoint", MODES)
@examples(15)
@given(model=models(least=1), schedule=st.sampled_from(["zb_h1", "zb_h2"]))
def test_random_models_hold_what_they_do_in_the_engine(model, schedule, checkpoint, tokens):
    names, balance, m, samples = model
    try:
        module = nn.Sequential(
            nn.Embedding(4, WIDTH) if tokens else nn.Linear(WIDTH, WIDTH), *(LAYERS[name]() for name in names)
        )
        x = torch.zeros(samples * m, LENGTH, dtype=torch.long) if tokens else torch.ones(samples * m, LENGTH, WIDTH)
        module(x).sum().backward()
    except RuntimeError as error:
        # What a layer keeps is written to by the next one: no plain module either.
        assert "inplace operation" in str(error)  # noqa: PT017 - anything else is a failure
        return
    module.zero_grad(set_to_none=True)
    compare(module, x, balance, chunks=m, checkpoint=checkpoint, schedule=schedule)


SMALL = {
    "unet": {"depth": 2, "B": 1, "C": 4, "size": 16, "dropout": 0.0},
    "amoebanet-d": {"L": 3, "D": 16, "size": 64, "classes": 10},
    "vit": {"L": 3, "D": 32, "heads": 2, "size": 32, "patch": 8, "classes": 10},
    "gpt2": {"L": 2, "D": 32, "heads": 2, "vocabulary": 64, "context": 32, "dropout": 0.0},
}


@pytest.mark.parametrize("name", SMALL)
def test_models_of_the_suite_hold_what_they_do_in_the_engine(name):
    spec = SUITE[name]
    values = spec.check(SMALL[name])
    module = spec.build(**values)
    x, _ = spec.make_batch(4, values)
    layers = len(module)
    balance = [layers // 3, layers // 3, layers - 2 * (layers // 3)]
    # On the CPU attention is another kernel, and gradients of bias and weight come in another order.
    compare(module, x, balance, rel=0.1, chunks=2, checkpoint="never", schedule="zb_h1")
