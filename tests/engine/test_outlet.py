"""The gradient of a scheduled task's sole output belongs to the task: it lets go of it when its last layer has."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from torch import nn

from tests.engine.support import assert_same, on_cpu, train_step

WIDTH = 64
LARGE = 256


class Between(nn.Module):
    """Looks at the gradients of its linear layer: that of the output, and later that of what it computes it from."""

    def __init__(self, gone):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gone = gone

    def forward(self, x):
        came = []
        inner = torch.tanh(x)
        outer = self.linear(inner)
        if outer.requires_grad:
            outer.register_hook(lambda grad: came.append(weakref.ref(grad.untyped_storage())))
            inner.register_hook(lambda _: self.gone.append(came.pop()() is None))
        return outer


@pytest.mark.parametrize("workers", ["never", "always"])
@pytest.mark.parametrize("rows", [1, LARGE])
def test_nobody_else_holds_the_gradient(rows, workers):
    gone = []
    layers = [nn.Linear(WIDTH, WIDTH), Between(gone), Between(gone), nn.Linear(WIDTH, 1)]
    pipe = on_cpu(
        nn.Sequential(*layers), [1, 1, 2], chunks=2, checkpoint="never", backward="scheduled", workers=workers
    )
    for _ in range(3):
        gone.clear()
        pipe(torch.randn(2 * rows, WIDTH)).square().mean().backward()
        assert gone == [True] * 4  # of two layers in two micro-batches


class Looked(nn.Module):
    """Keeps the gradient of its output, as a user who looks at it does, in two ways."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.outputs, self.grads = [], []

    def forward(self, x):
        output = self.linear(x)
        output.retain_grad()
        output.register_hook(self.grads.append)
        self.outputs.append(output)
        return output


@pytest.mark.parametrize("workers", ["never", "always"])
def test_hooks_of_the_output_see_its_gradient(workers):
    model = nn.Sequential(Looked(), nn.Linear(WIDTH, WIDTH)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(LARGE, WIDTH).double()
    pipe = on_cpu(model, [1, 1], chunks=1, checkpoint="never", backward="scheduled", workers=workers)
    for _ in range(2):
        assert_same(train_step(pipe, x), train_step(plain, x))
        torch.testing.assert_close(model[0].grads[-1], plain[0].grads[-1])
        torch.testing.assert_close(model[0].outputs[-1].grad, plain[0].outputs[-1].grad)


class Late(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, failing):
        ctx.failing = failing
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.failing.pop():
            raise RuntimeError("on its way")
        return grad, None


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.failing = []

    def forward(self, x):
        return Late.apply(x, self.failing)


@pytest.mark.parametrize("workers", ["never", "always"])
def test_after_an_exception_the_next_batch_is_whole(workers):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Fails(), nn.Linear(WIDTH, WIDTH)).double()
    plain = copy.deepcopy(model)
    x = torch.randn(2 * LARGE, WIDTH).double()
    pipe = on_cpu(model, [1, 1, 1], chunks=2, checkpoint="never", backward="scheduled", workers=workers)
    model[1].failing[:] = [False, True]
    with pytest.raises(RuntimeError, match="on its way"):
        pipe(x).sum().backward()
    model[1].failing[:] = [False, False]
    plain[1].failing[:] = [False]
    assert_same(train_step(pipe, x), train_step(plain, x))
