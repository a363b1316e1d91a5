"""On one accelerator: mixed precision."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gpipe_bench import is_recomputing
from tests.engine.support import MODES, SOME, label
from tests.gpu.support import placed

pytestmark = pytest.mark.gpu

WIDTH, M = 64, 4


class Typed(nn.Module):
    """Notes the type of its products."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seen: dict[bool, set[torch.dtype]] = {}

    def forward(self, x):
        y = self.linear(x)
        self.seen.setdefault(is_recomputing(), set()).add(y.dtype)
        return torch.tanh(y)


def batch(device: torch.device) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2)).to(device)


def gradients(model, pieces, dtype):
    model.zero_grad()
    for piece in pieces:
        with torch.autocast(piece.device.type, dtype):
            loss = model(piece).float().square().sum()
        loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", SOME, ids=label)
def test_types_and_gradients_are_those_of_the_microbatches(devices, components, checkpoint, dtype):
    torch.manual_seed(0)
    device = devices[0]
    plain = nn.Sequential(Typed(), Typed()).to(device)
    options = {"components": components, "checkpoint": checkpoint, "transfer": "host"}
    pipe = placed(copy.deepcopy(plain), [1, 1], devices, chunks=M, **options)
    found = gradients(pipe, [batch(device)], dtype)
    assert all(types == {dtype} for layer in pipe for types in layer.seen.values())
    assert all((True in layer.seen) == (checkpoint != "never") for layer in pipe)
    expected = gradients(plain, batch(device).chunk(M), dtype)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.to(device), other, rtol=0.02, atol=0.02)


def test_a_gradient_scaler(device):
    torch.manual_seed(0)
    pipe = placed(nn.Sequential(Typed(), Typed()), [1, 1], [device], chunks=M, transfer="host")
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler(device.type)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            loss = pipe(batch(device)).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0]
