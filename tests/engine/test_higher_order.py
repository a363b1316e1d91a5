"""Higher-order operators and compiled functions in layers: what they call runs as layers do, in every mode of ours."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from gpipe_bench.autograd.dispatch_mode import DispatchMode
from gpipe_bench.engine.worker import Turns
from tests.engine.steps import scheduled

# The compiler that PyTorch calls for them warns of PyTorch's own code.
pytestmark = pytest.mark.filterwarnings("ignore")


def attend(x):
    heads = x.view(-1, 1, 2, 2)
    return flex_attention(heads, heads, heads, score_mod=lambda score, b, h, q, k: score + (q - k)).reshape(x.shape)


OPERATORS = {
    "cond": lambda x: torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,)),
    "while_loop": lambda x: while_loop(lambda i, _: i < 3, lambda i, v: (i + 1, v.sin()), (torch.tensor(0), x))[1],
    "map": lambda x: map_over(torch.sin, x),
    "scan": lambda x: (
        scan(lambda one, other: (one + other, one * other), torch.zeros(len(x)), x, dim=1)[0][:, None] * x
    ),
    "associative_scan": lambda x: associative_scan(torch.mul, x, dim=1, combine_mode="generic"),
}


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x).reshape(x.shape)


def chain(function):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Calls(function), nn.Linear(4, 4))


@pytest.mark.parametrize("schedule", [None, "zb_h1"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_gradients_are_those_of_the_plain_module(operator, schedule):
    plain = chain(OPERATORS[operator])
    pipe = scheduled(copy.deepcopy(plain), [1, 2], schedule, chunks=2)
    x, target = torch.rand(8, 4), torch.rand(8, 4)
    expected = nn.functional.mse_loss(plain(x), target)
    expected.backward()
    torch.testing.assert_close(pipe.step(x, target, nn.functional.mse_loss), expected.detach())
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize(
    ("operator", "schedule"), [*((each, "1f1b") for each in OPERATORS), ("cond", None), ("cond", "zb_h1")]
)
def test_partitions_that_trace_take_turns(operator, schedule):
    """PyTorch traces in global state: two threads at once fail, and leave it broken."""
    x, target = torch.rand(8, 4), torch.rand(8, 4)
    found = []
    for workers in ("never", "always"):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), Calls(OPERATORS[operator])) for _ in range(2)))
        pipe = scheduled(layers, [1, 1], schedule, chunks=4, checkpoint="always", workers=workers)
        pipe.step(x, target, nn.functional.mse_loss)
        found.append([parameter.grad for parameter in pipe.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


def compiled():
    return torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), backend="aot_eager")


def linear(after):
    return nn.Sequential(nn.Linear(4, 4), after)


def calling():
    return linear(Calls(OPERATORS["cond"]))


def traced_loss(output, target):
    return torch.cond(output.sum() > 0, nn.functional.mse_loss, nn.functional.l1_loss, (output, target))


BESIDE = {
    "a compiled layer": ("1f1b", lambda: [calling(), compiled(), calling(), compiled()], 4, nn.functional.mse_loss),
    "a traced loss": ("zb_h1", lambda: [linear(nn.Tanh()), calling()], 4, traced_loss),
    "a recomputation beside a backward pass": (
        "1f1b",
        lambda: [calling() for _ in range(4)],
        1,
        nn.functional.mse_loss,
    ),
}


@pytest.mark.parametrize("case", BESIDE)
def test_whatever_may_trace_beside_an_operator_takes_turns_with_it(case):
    schedule, make, chunks, loss = BESIDE[case]
    x, target = torch.rand(8, 4) - 0.5, torch.rand(8, 4)
    found = []
    for workers in ("never", "always"):
        torch.compiler.reset()
        torch.manual_seed(0)
        layers = nn.Sequential(*make())
        pipe = scheduled(layers, [1] * len(layers), schedule, chunks=chunks, checkpoint="always", workers=workers)
        for _ in range(2):
            pipe.step(x, target, loss)
        found.append([parameter.grad for parameter in pipe.parameters()])
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("operator", [each for each in OPERATORS if each != "associative_scan"])  # that calls operators
def test_a_mode_sees_what_traces(operator):
    with DispatchMode() as mode:
        OPERATORS[operator](torch.rand(2, 4, requires_grad=True))
    assert mode.traced


def known(*operators):
    """The turns of partitions that have run once."""
    turns = Turns()
    for place, operator in enumerate(operators):
        with turns.turn(place):
            operator(torch.rand(2, 4))
    return turns


def run_together(turns, patience_s=30.0):
    """Whether a second task ends within so long while a first one runs."""
    ended = threading.Event()

    def second():
        with turns.turn(1):
            ended.set()

    thread = threading.Thread(target=second)
    with turns.turn(0):
        thread.start()
        found = ended.wait(patience_s)
    thread.join()
    return found


@pytest.mark.parametrize("place", [0, 1])
def test_one_partition_that_traces_lets_all_take_turns(place):
    operators = [torch.sin, torch.sin]
    operators[place] = OPERATORS["cond"]
    assert not run_together(known(*operators), 0.1)


def test_partitions_that_do_not_trace_run_together():
    assert run_together(known(torch.sin, torch.sin))


def test_partitions_take_turns_in_their_first_tasks():
    turns = Turns()
    assert not run_together(turns, 0.1)
    assert run_together(turns)


@torch.no_grad()
def test_flex_attention():
    plain = chain(attend)
    x = torch.rand(8, 4)
    torch.testing.assert_close(scheduled(copy.deepcopy(plain), [1, 2], "1f1b", chunks=2)(x), plain(x))


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_numbers_drawn_in_a_branch_are_drawn_again_in_a_recomputation(schedule):
    plain = chain(lambda x: torch.cond(x.sum() > -99, lambda v: nn.functional.dropout(v, 0.5), torch.cos, (x,)))
    x, target = torch.rand(8, 4), torch.rand(8, 4)
    found = []
    for checkpoint in ("always", "never"):
        pipe = scheduled(copy.deepcopy(plain), [1, 2], schedule, chunks=2, checkpoint=checkpoint)
        torch.manual_seed(5)
        loss = pipe.step(x, target, nn.functional.mse_loss)
        found.append([loss, *(parameter.grad for parameter in pipe.parameters())])
    torch.testing.assert_close(*found, rtol=0, atol=0)
