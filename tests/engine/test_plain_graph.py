"""The backward pass meets what it meets in the plain module: each hook and Function as often, dead layers never."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe_bench import Components, GPipe
from gpipe_bench.skip import pop, skippable, stash
from tests.cover import cover
from tests.engine.support import MODES, label

M = 3
SCHEDULES = (None, "gpipe", "1f1b", "interleaved", "zb_h1")
WAYS = list(product(SCHEDULES, MODES))


class Log(torch.autograd.Function):
    """Its derivative is infinite at zero, so that a gradient of zeros gives NaN; counts its backward passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Counter[str]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.counts = counts
        return x.log()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.counts["Log"] += 1
        return grad / ctx.saved_tensors[0], None


class Layer(nn.Module):
    """(x, unused values...) -> (f(x), unused values..., one more); hooks halve gradients, and count."""

    def __init__(self, counts: Counter[str], place: int) -> None:
        super().__init__()
        self.live, self.dead = nn.Linear(4, 4), nn.Linear(4, 4)
        self.counts, self.place = counts, place

    def hook(self, tensor: Tensor, name: str) -> Tensor:
        def halve(grad: Tensor) -> Tensor:
            self.counts[f"{name} {self.place}"] += 1
            return grad * 0.5

        if tensor.requires_grad:
            tensor.register_hook(halve)
        return tensor

    def forward(self, value: Any) -> tuple[Tensor, ...]:
        x, *unused = value if isinstance(value, tuple) else (value,)
        self.hook(x, "input")
        zeros = self.dead(x).abs() * torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=x.dtype)
        dead = self.hook(zeros.exp(), "dead")
        Log.apply(zeros, self.counts)
        y = self.hook(torch.tanh(self.live(x)) + x, "output")
        return (y, *unused, Log.apply(zeros, self.counts) + dead)


@skippable(stash=["unused"])
class Stash(Layer):
    def forward(self, value: Any) -> Any:
        *values, last = super().forward(value)
        yield stash("unused", last)
        return tuple(values)


@skippable(pop=["unused"])
class Pop(Layer):
    def forward(self, value: Any) -> Any:
        skip = yield pop("unused")
        return (*super().forward(value), self.hook(skip, "skip") * 2)


def model(counts: Counter[str]) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(kind(counts, j) for j, kind in enumerate((Layer, Stash, Layer, Pop)))).double()


def step(layers: Any, batch: Tensor, schedule: str | None, *, whole: bool) -> None:
    """A step whose loss uses the first output alone."""
    if whole:
        layers(batch)[0].square().sum().backward()
    else:
        layers.step(batch, None, lambda output, _: output[0].square().sum(), reduction="sum")


def gradients(layers: nn.Module, batch: Tensor) -> list[Tensor | None]:
    return [batch.grad, *(weight.grad for weight in layers.parameters())]


@pytest.mark.parametrize(
    ("schedule", "mode", "components", "learns", "transfer"),
    cover(
        product(SCHEDULES, ("always", "except_last"), Components.factorial(), (True, False), ("direct", "host")),
        lambda one: (one[0], one[1], one[2].label, one[3], one[4]),
        together=2,
    ),
    ids=label,
)
def test_hooks_run_as_often_and_dead_layers_never(schedule, mode, components, learns, transfer):
    """Also where the batch itself needs a gradient."""
    plain_counts, counts = Counter(), Counter()
    plain, layers = model(plain_counts), model(counts)
    batch = torch.rand(2 * M, 4, dtype=torch.float64)
    theirs = batch.clone().requires_grad_(learns)
    # Each micro-batch by itself, to count as a pipeline does.
    for i in range(M):
        step(plain, theirs[2 * i : 2 * i + 2], None, whole=True)
    n = 4
    devices = ["cpu"] * (n // 2 if schedule == "interleaved" else n)
    options: dict[str, Any] = {"components": components, "transfer": transfer, "schedule": schedule}
    pipe = GPipe(layers, [1] * n, devices=devices, chunks=M, checkpoint=mode, **options)
    ours = batch.clone().requires_grad_(learns)
    step(pipe, ours, schedule, whole=schedule in {None, "gpipe"})
    torch.testing.assert_close(gradients(pipe, ours), gradients(plain, theirs))
    assert counts == plain_counts
    assert "Log" not in counts


@pytest.mark.parametrize(("schedule", "mode"), [way for way in WAYS if way[1] != "never" or way[0] is not None])
def test_a_whole_batch_without_a_gradient_of_one_partition(schedule, mode):
    """The last layer uses the skip alone, so that nothing of the partitions between runs backward."""
    counts: Counter[str] = Counter()

    @skippable(stash=["far"])
    class Leave(nn.Module):
        def forward(self, x: Tensor) -> Any:
            yield stash("far", x * 2)
            return x + 0

    @skippable(pop=["far"])
    class Take(nn.Module):
        def forward(self, x: tuple[Tensor, ...]) -> Any:
            far = yield pop("far")
            return far, x[0]

    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(4, 4), Leave(), Layer(counts, 2), Take()).double()
    devices = ["cpu"] * (2 if schedule == "interleaved" else 4)
    pipe = GPipe(layers, [1] * 4, devices=devices, chunks=M, checkpoint=mode, schedule=schedule)
    batch = torch.rand(2 * M, 4, dtype=torch.float64)
    step(pipe, batch, schedule, whole=schedule in {None, "gpipe"})
    found = [weight.grad for weight in pipe.parameters()]
    pipe.zero_grad()
    assert not counts
    layers(batch)[0].square().sum().backward()
    torch.testing.assert_close(found, [weight.grad for weight in layers.parameters()])


@pytest.mark.parametrize("writes", [True, False])
def test_the_last_microbatch_of_a_retained_graph_runs_backward_twice(writes):
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=writes), nn.Linear(4, 4), nn.ReLU(inplace=writes))
    pipe = GPipe(layers, [1, 1, 1, 1], devices=["cpu"] * 4, chunks=2)
    loss = pipe(torch.rand(4, 4)).sum()
    loss.backward(retain_graph=True)
    once = [weight.grad.clone() for weight in pipe.parameters()]
    loss.backward()
    torch.testing.assert_close([weight.grad for weight in pipe.parameters()], [grad * 2 for grad in once])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
