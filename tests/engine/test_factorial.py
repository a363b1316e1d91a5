"""Each of the 2^5 combinations of components trains like the plain module."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.engine.support import FACTORIAL, MODES, assert_same, crossing_model, label, on_cpu, train_step

pytestmark = pytest.mark.usefixtures("either_backward")

every_combination = pytest.mark.parametrize("components", FACTORIAL, ids=label)


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


@every_combination
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_model_with_crossing_skips(components, checkpoint, transfer):
    plain, x = crossing_model(), batch(7, 3)
    pipe = on_cpu(
        copy.deepcopy(plain), [2, 2, 3], chunks=3, checkpoint=checkpoint, components=components, transfer=transfer
    )
    assert_same(train_step(pipe, x), train_step(plain, x))


@every_combination
def test_a_small_unet(components):
    from gpipe_bench.models.unet import unet

    torch.manual_seed(0)
    plain = unet(depth=2, blocks=1, channels=2, dropout=0.0).double()
    x = batch(3, 3, 8, 8)
    sixth, rest = divmod(len(plain), 6)
    # the outer skip crosses all boundaries, the inner one those in the middle
    balance = [sixth + 1, 2 * sixth, sixth, 2 * sixth + rest - 1]
    pipe = on_cpu(copy.deepcopy(plain), balance, chunks=3, components=components, transfer="host")
    assert_same(train_step(pipe, x), train_step(plain, x))


def in_microbatches(module: nn.Module, chunks: int):
    """What a pipeline computes where the batch matters: every micro-batch by itself."""

    class Loop(nn.Module):
        def forward(self, x):
            return torch.cat([module(piece) for piece in x.chunk(chunks)])

        def named_parameters(self, *args, **kwargs):
            return module.named_parameters(*args, **kwargs)

    loop = Loop()
    loop.add_module("module", module)
    return loop


@pytest.fixture(scope="module")
def amoebanet():
    """A small AmoebaNet-D, a batch, and what the plain module makes of it."""
    from gpipe_bench.models.amoebanet import amoebanet_d

    torch.manual_seed(0)
    plain = amoebanet_d(layers=3, channels=8, classes=5, size=64).double()
    x = batch(2, 3, 64, 64).detach()
    # a pass in training mode changes running statistics
    return copy.deepcopy(plain), x, train_step(in_microbatches(plain, 2), x)


@every_combination
def test_a_small_amoebanet(amoebanet, components):
    plain, x, expected = amoebanet
    pipe = on_cpu(copy.deepcopy(plain), [3, 3, 3], chunks=2, components=components)
    assert_same(train_step(pipe, x), expected)
