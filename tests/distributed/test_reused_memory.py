"""What reaches another process is what a layer returned, though it writes to the same memory in the meantime."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench import is_checkpointing, is_recomputing
from gpipe_bench.distributed import Pipe
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.skip import skippable, stash
from tests.distributed.test_parity import apart, ranks_of
from tests.distributed.virtual import results_of
from tests.engine.steps import DOUBLE
from tests.engine.support import MODES
from tests.engine.test_kept_memory import (
    CHUNKS,
    KINDS,
    WIDTH,
    Multiplying,
    Using,
    counting,
    evaluated_in_a_loop,
    in_a_loop,
    numbers,
    prepared,
)

ONE_PER_DEVICE = [schedule for schedule in SCHEDULES if schedule not in DOUBLE]


class Hidden(nn.Module):
    """Writes outputs of evaluation to memory that is no part of the layer, and gradients to memory that it has."""

    def __init__(self):
        super().__init__()
        self.weight, memory = nn.Parameter(torch.rand(WIDTH, WIDTH)), torch.zeros(2, 2, WIDTH, dtype=torch.float64)

        class Same(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, grad):
                return memory[0].copy_(grad)

        def output(x):
            y = Same.apply(x) @ self.weight
            return y if torch.is_grad_enabled() or is_checkpointing() else memory[1].copy_(y)

        self.output = output

    def forward(self, x):
        return self.output(x)

    def __deepcopy__(self, memo):
        other = Hidden().double()
        other.load_state_dict(self.state_dict())
        return other


class Closed(nn.Module):
    """Hands on a table that only a function knows, and that it updates in place."""

    def __init__(self):
        super().__init__()
        self.linear, table = nn.Linear(WIDTH, WIDTH), torch.ones(WIDTH, dtype=torch.float64)
        self.counted = lambda: table if is_recomputing() else table.mul_(1.5)

    def forward(self, x):
        return self.linear(x), self.counted()

    def __deepcopy__(self, memo):
        other = type(self)().double()
        other.load_state_dict(self.state_dict())
        return other


@skippable(stash=["table"])
class ClosedStash(Closed):
    def forward(self, x):
        yield stash("table", self.counted())
        return self.linear(x)


def closed(kind):
    torch.manual_seed(0)
    between = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
    layers = [Closed(), Using(), Closed(), Using()] if kind == "value" else [ClosedStash(), *between, Multiplying()]
    return nn.Sequential(*layers).double()


def hidden():
    torch.manual_seed(0)
    return nn.Sequential(*(Hidden() for _ in range(4))).double()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_memory_that_is_updated_in_place(schedule, checkpoint, kind):
    options = {"schedule": schedule, "chunks": CHUNKS, "checkpoint": checkpoint}
    assert_equal_to_a_loop(counting(kind), options)


@pytest.mark.parametrize("kind", ["value", "skip"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ONE_PER_DEVICE)
def test_memory_that_no_attribute_shows(schedule, checkpoint, kind):
    assert_equal_to_a_loop(closed(kind), {"schedule": schedule, "chunks": CHUNKS, "checkpoint": checkpoint})


@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("schedule", ONE_PER_DEVICE)
def test_gradients_in_memory_that_a_function_keeps(schedule, checkpoint):
    assert_equal_to_a_loop(hidden(), {"schedule": schedule, "chunks": CHUNKS, "checkpoint": checkpoint})


def assert_equal_to_a_loop(model, options):
    ranks = ranks_of(options["schedule"], 4)
    copies = [copy.deepcopy(model) for _ in range(ranks)]
    ((value, grads),) = apart(
        ranks, lambda group: Pipe(copies[group.rank()], [1] * 4, group=group, **options), [numbers()]
    )
    expected, expected_grads = in_a_loop(model)
    torch.testing.assert_close(value, expected)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    ("make", "schedule"),
    [
        *((lambda: prepared("out="), schedule) for schedule in SCHEDULES),
        *((lambda: nn.Sequential(*[*hidden()][:3], nn.Identity()), schedule) for schedule in ONE_PER_DEVICE),
    ],
)
def test_outputs_of_an_evaluation_in_prepared_memory(make, schedule, mode):
    model = make()
    copies = [copy.deepcopy(model) for _ in range(4)]

    def job(group):
        pipe = Pipe(copies[group.rank()], [1] * 4, schedule=schedule, group=group, chunks=CHUNKS)
        with mode():
            return [pipe(numbers()[0]) for _ in range(2)]

    expected = evaluated_in_a_loop(model)
    outputs = [output for found in results_of(ranks_of(schedule, 4), job) for output in found if output is not None]
    assert len(outputs) == 2
    assert all(torch.equal(output, expected) for output in outputs)
