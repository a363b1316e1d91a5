"""W: which weights branch off where, and which of them one call of autograd may compute."""

from __future__ import annotations

import random
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from gpipe_bench import GPipe
from tests.engine.steps import SPLIT, mean_loss, samples, scheduled, step, targets
from tests.engine.support import assert_same

pytestmark = pytest.mark.usefixtures("no_gc")
SEEDS = range(12)


class Tangle(nn.Module):
    """Linear layers, each of which reads the values of some before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.linears = nn.ModuleList(nn.Linear(3, 3, bias=draw.random() < 0.5) for _ in range(draw.randint(2, 8)))
        self.reads = [draw.sample(range(k + 1), draw.randint(1, min(k + 1, 3))) for k in range(len(self.linears))]
        # Some layers get the gradient of a weight of theirs from operators of their own.
        self.scales = nn.ParameterList(torch.rand(3) for _ in self.linears if draw.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for k, linear in enumerate(self.linears):
            read = torch.stack([values[index] for index in self.reads[k]]).sum(0)
            scale = self.scales[k].exp() if k < len(self.scales) else 1
            values.append(torch.tanh(linear(read)) * scale)
        return torch.stack(values).sum(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_tangled_layers(seed):
    torch.manual_seed(seed)
    plain = nn.Sequential(*(Tangle(4 * seed + j) for j in range(4))).double()
    pipe = scheduled(plain, [2, 2], "zb_h1", chunks=3, checkpoint="never", workers="never")
    assert_same(step(pipe, samples(7, 3), targets(7)), step(plain, samples(7, 3), targets(7)))


def test_what_a_hook_makes_of_a_gradient_in_i_is_what_w_takes():
    """The hook runs again in W, and would give another gradient."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.factors = nn.Linear(3, 3), nn.Linear(3, 3), count(2)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            hidden.register_hook(lambda grad: grad * next(self.factors))
            return self.other(hidden)

    plain = nn.Sequential(Counting(), nn.Linear(3, 3)).double()
    pipe = scheduled(plain, [1, 1], "zb_h1", chunks=1, checkpoint="never", workers="never")
    found = step(pipe, samples(2, 3), targets(2))
    plain[0].factors = count(2)
    assert_same(found, step(plain, samples(2, 3), targets(2)))


def test_a_graph_that_a_layer_keeps_aside_holds_no_gradient():
    held: list[StorageWeakRef] = []

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.aside = nn.Linear(3, 3), nn.Linear(3, 3), []

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.one(x)
            hidden.register_hook(lambda grad: held.append(StorageWeakRef(grad.untyped_storage())))
            self.aside.append(hidden * 1)
            return self.other(hidden)

    pipe = scheduled(nn.Sequential(Aside(), Aside()).double(), [1, 1], "zb_h1", chunks=2, checkpoint="never",
                     workers="never")  # fmt: skip
    pipe.step(samples(2, 3), targets(2), mean_loss)
    assert held
    assert all(each.expired() for each in held)


@pytest.mark.parametrize("schedule", SPLIT)
def test_weights_that_get_one_and_the_same_gradient_do_not_share_it(schedule):
    """With micro-batches of one sample an addition gives all three of them the tensor that it has got."""

    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Parameter(torch.zeros(1, 3)), nn.Parameter(torch.zeros(1, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.one + self.other

    plain = nn.Sequential(nn.Linear(3, 3), Add(), nn.Linear(3, 3), Add()).double()
    pipe = scheduled(plain, [2, 2], schedule, chunks=4, checkpoint="never", workers="never")
    assert_same(step(pipe, samples(4, 3), targets(4)), step(plain, samples(4, 3), targets(4)))


class Negated(torch.autograd.Function):
    """-x, in place in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.neg_()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.neg_()


@pytest.mark.parametrize("part", [lambda x: x, lambda x: x[:], lambda x: x[:, :2]], ids=["whole", "view", "slice"])
@pytest.mark.parametrize("schedule", SPLIT)
def test_w_takes_gradients_as_they_were_before_a_function_wrote_to_them(schedule, part):
    """Of a view autograd hides the function in a node of its own, which W does not take for a user's."""

    class Write(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1, 3))

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1
            Negated.apply(part(x))
            return x + self.weight

    plain = nn.Sequential(nn.Linear(3, 3), Write(), Write(), nn.Linear(3, 3), Write(), nn.Linear(3, 3)).double()
    pipe = scheduled(plain, [2, 1, 1, 2], schedule, chunks=4, checkpoint="never", workers="never")
    assert_same(step(pipe, samples(4, 3), targets(4)), step(plain, samples(4, 3), targets(4)))


class Reentrant(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(lambda value: self.linear(value).tanh(), x, use_reentrant=True)
        return result


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pipe = GPipe(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), [1, 1], devices=["cpu"] * 2, chunks=2)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.pipe(x)
        return result


@pytest.mark.parametrize("layer", [Reentrant, Nested])
@pytest.mark.parametrize("schedule", SPLIT)
def test_layers_that_want_gradients_of_all_weights_run_backward_whole(schedule, layer):
    plain = nn.Sequential(nn.Linear(3, 3), layer(), nn.Linear(3, 3), layer()).double()
    pipe = scheduled(plain, [1] * 4, schedule, chunks=2, checkpoint="never", workers="never")
    assert_same(step(pipe, samples(4, 3), targets(4)), step(plain, samples(4, 3), targets(4)))
