"""``clip_grad_norm_`` over processes has the bits of ``torch.nn.utils.clip_grad_norm_`` in one."""

from __future__ import annotations

import copy
import random
from math import inf

import pytest
import torch
from torch import nn

from gpipe_bench.distributed import Pipe
from tests.distributed.virtual import results_of

TYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64]
SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zb_v", 2), ("dualpipe_v", 2)]


class Weights(nn.Module):
    """A layer of parameters, some of which have a gradient."""

    def __init__(self, draw, types):
        super().__init__()
        self.weights = nn.ParameterList()
        for _ in range(draw.randint(0, 5)):
            shape = draw.choice([(), (7,), (5, 3), (4, 2)])
            weight = nn.Parameter(torch.zeros(shape, dtype=draw.choice(types)))
            if draw.random() < 0.8:
                weight.grad = torch.randn(shape).mul(10 ** draw.uniform(-2, 1)).to(weight.dtype)
            self.weights.append(weight)


def drawn(seed):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    schedule, several = draw.choice(SCHEDULES)
    ranks = draw.randint(1, 3)
    balance = [draw.randint(1, 3) for _ in range(ranks * several)]
    types = draw.sample(TYPES, draw.choice([1, 1, 2, 5]))
    return nn.Sequential(*(Weights(draw, types) for _ in range(sum(balance)))), balance, schedule, ranks


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3, 0.5, inf, "inf"])
def test_the_bits_of_one_process(norm_type):
    for seed in range(30):
        plain, balance, schedule, ranks = drawn(seed)

        def job(group, plain=plain, balance=balance, schedule=schedule):
            layers = copy.deepcopy(plain)
            for own, given in zip(layers.parameters(), plain.parameters(), strict=True):
                own.grad = None if given.grad is None else given.grad.clone()
            pipe = Pipe(layers, balance, schedule=schedule, chunks=2 * len(balance), group=group)
            return pipe.clip_grad_norm_(1.0, norm_type), {name: each.grad for name, each in pipe.named_parameters()}

        results = results_of(ranks, job)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
        grads = {name: grad for _, found in results for name, grad in found.items()}
        assert all(found.dtype == norm.dtype and torch.equal(found, norm) for found, _ in results), seed
        for name, weight in plain.named_parameters():
            grad = grads.pop(name)
            assert (grad is None) == (weight.grad is None)
            assert grad is None or torch.equal(grad, weight.grad), (seed, name)
        assert not grads
