"""Which tasks draw is observed: whatever operator draws, and in whichever batch or micro-batch it begins."""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpipe_bench import GPipe
from tests.cover import cover
from tests.engine.steps import ALL, scheduled
from tests.engine.support import MODES
from tests.engine.test_randomness import SIZE, Drop, batch, masks


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize(("schedule", "checkpoint"), list(product(ALL, MODES)))
def test_layers_may_begin_to_draw_in_any_batch(schedule, checkpoint, workers):
    """In batch 1 the second layer, in batch 2 all: the masks of one seed are those of a pipeline that always drew."""
    runs = []
    for late in (False, True):
        layers = nn.Sequential(*(Drop(on=not late) for _ in range(4)))
        pipe = scheduled(layers, [1] * 4, schedule, chunks=3, checkpoint=checkpoint, workers=workers)
        for number in range(3):
            for index, layer in enumerate(layers):
                layer.on = number == 2 or (number == 1 and index == 1) or not late
            torch.manual_seed(number)
            pipe.step(batch(3), None, lambda output, _: output.square().sum(), reduction="sum")
        for layer in layers:
            for i, again in layer.again.items():
                assert all(map(torch.equal, again, layer.first[i]))
        runs.append([layer.first[i][-1] for layer in layers for i in range(3)])
    assert all(map(torch.equal, *runs))


class SometimesDrawing(nn.Module):
    """Weighted ones under a mask in chosen micro-batches: the gradient of the input must equal the output."""

    def __init__(self, drawn: Callable[[Tensor], Tensor], where: Container[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))
        self.drawn, self.where = drawn, where

    def forward(self, x: Tensor) -> Tensor:
        i = int(x[0, 0].detach())
        y = x * self.weight
        if i not in self.where:
            return y
        mask = self.drawn(torch.ones_like(x)).detach()
        return y * torch.cat([torch.ones_like(mask[:, :1]), mask[:, 1:]], 1)


@torch.library.custom_op("gpipe_bench_tests::drawn", mutates_args=())
def untagged(x: Tensor) -> Tensor:
    """As kernels of users draw: PyTorch does not know that it is random."""
    return torch.rand_like(x)


DRAWN = {
    "tagged": torch.rand_like,
    "untagged": untagged,
    "default": lambda x: torch.rand(x.shape, generator=torch.default_generator),
    "own generator": None,
}


def sometimes(name: str, where: Container[int]) -> SometimesDrawing:
    layer = SometimesDrawing(DRAWN[name], where)
    if name == "own generator":
        layer.generator = torch.Generator().manual_seed(3)
        layer.drawn = lambda x: torch.rand(x.shape, generator=layer.generator)
    return layer


@pytest.mark.parametrize(
    ("name", "schedule", "checkpoint", "where", "workers"),
    cover(product(DRAWN, ALL, MODES, [range(4), frozenset({2}), frozenset({1, 3})], ["always", "never"])),
    ids=str,
)
def test_whatever_draws_in_whichever_microbatch_is_drawn_again(name, schedule, checkpoint, where, workers):
    """The output is x times the weight of the last layer times masks: so the weight's gradient tells the masks."""
    outputs = []
    for _ in range(2):
        torch.manual_seed(5)
        layers = [nn.Identity(), sometimes(name, where), nn.Identity(), sometimes(name, where)]
        options = {"chunks": 4, "checkpoint": checkpoint, "workers": workers}
        if schedule is None:
            pipe = GPipe(nn.Sequential(*layers), [1] * 4, devices=["cpu"] * 4, **options)
        else:
            pipe = scheduled(nn.Sequential(*layers), [1] * 4, schedule, **options)
        for _ in range(2):
            pipe.zero_grad()
            if schedule is None:
                output = pipe(batch(4))
                output.sum().backward()
            else:
                kept = pipe.step(batch(4), None, lambda y, _: y.sum(), reduction="sum", return_output=True)
                output = kept[1]
            for layer in (layers[1], layers[3]):
                torch.testing.assert_close(layer.weight.grad, output.detach().sum(0))
            outputs.append(output.detach())
    if where == range(4):
        assert torch.equal(outputs[0], outputs[2])
        assert torch.equal(outputs[1], outputs[3])


class Checkpointed(nn.Module):
    """A checkpoint of PyTorch's, which sets the default generator in its backward pass and puts it back."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda x: x * self.one * self.one, x, use_reentrant=False)


class NoisyGradient(nn.Module):
    """A hook that draws in the backward pass, whose numbers count nothing here."""

    def forward(self, x: Tensor) -> Tensor:
        if x.requires_grad:
            x.register_hook(lambda grad: grad + 0 * torch.rand_like(grad))
        return x


@pytest.mark.parametrize("beside", [Checkpointed, NoisyGradient])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1"])
def test_an_operator_without_a_tag_draws_what_nobody_disturbs(schedule, beside):
    torch.manual_seed(5)
    layers = [beside(), sometimes("untagged", range(16)), beside(), sometimes("untagged", range(16))]
    pipe = scheduled(nn.Sequential(*layers), [1] * 4, schedule, chunks=16, checkpoint="always")
    rows = torch.arange(16.0).repeat_interleave(64)[:, None].expand(-1, SIZE).contiguous()
    for _ in range(3):
        pipe.zero_grad()
        _, output = pipe.step(rows, None, lambda y, _: y.sum(), reduction="sum", return_output=True)
        for layer in (layers[1], layers[3]):
            torch.testing.assert_close(layer.weight.grad, output.sum(0))


@pytest.mark.parametrize("schedule", [None, "gpipe", "interleaved"])
@pytest.mark.parametrize("way", ["layers", "attribute"])
def test_one_seed_gives_one_set_of_masks_after_an_evaluation(schedule, way):
    """MC dropout: by layers in training mode, or by an attribute."""
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)))
    options = {"chunks": 4, "workers": "always"}
    if schedule is None:
        pipe = GPipe(layers, [1] * 4, devices=["cpu"] * 4, **options)
    else:
        pipe = scheduled(layers, [1] * 4, schedule, **options)
    samples = []
    with torch.no_grad():
        pipe.eval()(torch.ones(8, 4))
        for layer in layers:
            layer[1].train()
            layer[1].p = 0.5 if way == "layers" else 0.0
        pipe(torch.ones(8, 4))
        for layer in layers:
            layer[1].p = 0.5
        for _ in range(5):
            torch.manual_seed(3)
            samples.append(pipe(torch.ones(8, 4)))
    assert all(torch.equal(sample, samples[0]) for sample in samples)


@pytest.mark.parametrize("workers", ["always", "never"])
def test_a_loss_that_draws_leaves_the_masks_alone(workers):
    runs = []
    for draws in (False, True):
        torch.manual_seed(5)
        layers = nn.Sequential(*(Drop() for _ in range(4)))
        pipe = scheduled(layers, [1] * 4, "1f1b", chunks=4, checkpoint="always", workers=workers)

        def loss(output, _, draws=draws):
            return output.square().sum() + (torch.rand(3).sum() if draws else 0)

        pipe.step(batch(4), None, loss, reduction="sum")
        assert all(
            map(torch.equal, masks(pipe), [mask for layer in layers for i in range(4) for mask in layer.again[i]])
        )
        runs.append(masks(pipe))
    assert all(map(torch.equal, *runs))
