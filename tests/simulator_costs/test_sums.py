"""Sums of gradients: autograd adds to the first one in place where nobody else needs it, but not under a tracer."""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from gpipe_bench.kernels.kernel import Alloc
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.simulator.workloads.build import build_workload
from tests.simulator_costs.layers import ops, trace

WIDTH = 8


class Sum(nn.Module):
    """Sums what several functions make of one tensor."""

    def __init__(self, *functions):
        super().__init__()
        self.before, self.functions = nn.Linear(WIDTH, WIDTH), functions

    def forward(self, x):
        y = self.before(x)
        return sum((function(y) for function in self.functions[1:]), self.functions[0](y))


class Twice(nn.Module):
    """Uses its weight twice, whose gradients are views."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(self.linear(x).sin())


class _Added(torch.autograd.Function):
    """Adds in its own backward pass."""

    @staticmethod
    def forward(_ctx, x):
        return 5 * x

    @staticmethod
    def backward(_ctx, gradient):
        return 2 * gradient + 3 * gradient


def itself(x):
    return x


CASES = {
    "one": Sum(torch.sin),
    "two": Sum(torch.sin, torch.cos),
    "five": Sum(torch.sin, torch.cos, torch.tanh, torch.exp, torch.sigmoid),
    "a residual first": Sum(itself, torch.sin, torch.cos),
    "a residual last": Sum(torch.sin, torch.cos, itself),
    "parts": Sum(lambda y: y.chunk(2, dim=1)[0].repeat(1, 2), torch.sin, lambda y: y.flip(0)),
    "a function that adds": Sum(_Added.apply, torch.sin),
    "a weight that is used twice": Twice(),
}


def counted(module):
    """How many sums autograd makes, in place and as new tensors, while nobody watches."""
    x = torch.ones(4, WIDTH, requires_grad=True)
    loss = (module(x.sin()) * torch.ones(4, WIDTH)).sum()
    # No gradient is there, to which another would be added.
    module.zero_grad()
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        loss.backward()
    found = Counter(event.name for event in watched.events())
    return found["aten::add_"], found["aten::add"]


@pytest.mark.parametrize("name", CASES)
def test_sums_in_place_are_those_of_autograd(name):
    in_place, anew = counted(CASES[name])
    module = copy.deepcopy(nn.Sequential(nn.Linear(WIDTH, WIDTH), CASES[name]))
    traced = trace(module, 4, WIDTH)
    steps = traced.layers[1].backward
    assert sum(isinstance(step, Alloc) and step.onto >= 0 for step in steps) == in_place
    assert ops(traced, "backward").count("add") == in_place + anew


@pytest.mark.parametrize(("name", "in_place"), [("two", 1), ("five", 4), ("a function that adds", 1)])
def test_only_autograd_of_today_adds_in_place(name, in_place):
    with torch.device("meta"):
        module, sample = nn.Sequential(nn.Linear(WIDTH, WIDTH), CASES[name]), torch.empty(1, WIDTH)
    options = {"balance": [2], "batch_size": 4, "sample": sample, "optimizer": None, "profile": load_profile("p40")}
    today, before = (build_workload(module, **options, published=published) for published in (False, True))
    requests = [sum(op.kind == "alloc" for op in work.partitions[0][4].backward_memory) for work in (today, before)]
    assert requests[1] - requests[0] == in_place
