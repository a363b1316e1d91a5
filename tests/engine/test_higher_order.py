"""Higher-order operators and compiled functions in layers: what they call runs as layers do, in every mode of ours."""

from __future__ import annotations

import copy
import threading

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch._higher_order_ops.associative_scan import associative_scan
from torch._higher_order_ops.map import map as map_over
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from torch.nn.attention.flex_attention import flex_attention

from gpipe_bench.engine.randomness import Batch
from gpipe_bench.engine.redirect import Redirect
from gpipe_bench.measure.memory import LiveBytes
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


def test_a_task_that_traces_waits_for_another_one_alone():
    batch, traced = Batch([torch.device("cpu")] * 3, {}, concurrent=True, training=True), Redirect(0)
    traced.traced = True
    for j, redirect in enumerate((traced, traced, Redirect(0))):
        batch.learn(j, redirect)
    entered = []

    def enter(j):
        with batch.turn(j):
            entered.append(j)

    threads = [threading.Thread(target=enter, args=(j,)) for j in (1, 2)]
    with batch.turn(0):
        for thread in threads:
            thread.start()
        threads[1].join()
        assert entered == [2]
    threads[0].join()
    assert entered == [2, 1]


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


def sine(x):
    x.sum().item()
    return x.sin()


@pytest.mark.parametrize("mode", [lambda: Redirect(0), lambda: LiveBytes(nn.Linear(4, 4))], ids=["Redirect", "Watch"])
def test_the_compiler_does_not_look_into_a_mode(mode):
    torch.compiler.reset()
    counters.clear()
    with mode():
        torch.compile(sine, backend="eager")(torch.rand(4, 4))
    assert [text.partition("\n")[0] for text in counters["graph_break"]] == [
        "Unsupported Tensor.item() call with capture_scalar_outputs=False"
    ]
