"""Between I and W a cell holds what W needs, and nothing else that its nodes have saved."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from gpipe_bench import GPipe
from tests.engine.steps import mean_loss, samples, targets

pytestmark = pytest.mark.usefixtures("no_gc")


class Cubed(torch.autograd.Function):
    """x³, which reads what it has saved twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x, None, x * x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        _, _, square = ctx.saved_tensors
        return grad * 3 * (ctx.saved_tensors[0] ** 2 + square) / 2


FUNCTIONS = {
    "one tensor": torch.tanh,
    "two tensors": lambda x: x * x.sin(),
    "tensors and none": lambda x: x[:, torch.tensor([2, 0, 1])].exp(),
    "a custom function": Cubed.apply,
    "a reduction": lambda x: x.softmax(1),
    "a copy": lambda x: x.exp().clone().mul_(2).exp(),
}


class Between(nn.Module):
    """``function`` between two layers with weights."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.function, self.last = nn.Linear(3, 3), function, nn.Linear(3, 3)
        self.seen: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        inside = self.function(x) + 0
        self.seen += [StorageWeakRef(value.untyped_storage()) for value in (x, inside)]
        return self.last(inside)


class Watch:
    """An observer that asks at the beginning of each W what is alive."""

    def __init__(self, layer: Between) -> None:
        self.layer, self.alive = layer, []

    def start(self, task):
        if task.kind == "backward_weights":
            self.alive.append([not each.expired() for each in self.layer.seen])

    def finish(self, token, nbytes):
        pass


def compare(layers: list[nn.Module], rows: int = 2, chunks: int = 1):
    """A step with ``zb_h1`` and one of the plain module, which must agree."""
    torch.manual_seed(0)
    plain = nn.Sequential(*layers).double()
    pipe = GPipe(plain, [1] * len(plain), devices=["cpu"] * len(plain), chunks=chunks, checkpoint="never",
                 schedule="zb_h1", workers="never")  # fmt: skip
    x = samples(rows, 3)
    mean_loss(plain(x), targets(rows)).backward()
    expected = [parameter.grad.clone() for parameter in plain.parameters()]
    plain.zero_grad()
    yield pipe, x
    for parameter, grad in zip(plain.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_between_weights_is_freed_by_i(name):
    layer = Between(FUNCTIONS[name])
    for pipe, x in compare([layer, nn.Linear(3, 3)]):
        layer.seen.clear()
        watch = Watch(layer)
        with pipe.observe(watch):
            pipe.step(x, targets(2), mean_loss)
        # The first one is that of the last partition. The second Linear needs its input, which is the sum.
        assert watch.alive[-1] == [False, True]


def test_a_number_in_a_large_tensor_is_freed_with_it():
    held: list[StorageWeakRef] = []

    def function(x):
        large = x.exp()
        held.append(StorageWeakRef(large.untyped_storage()))
        return x * large[0, 0]

    for pipe, x in compare([Between(function), nn.Linear(3, 3)]):
        held.clear()
        watch = Watch(SimpleNamespace(seen=held))
        with pipe.observe(watch):
            pipe.step(x, targets(2), mean_loss)
        assert watch.alive[-1] == [False]


def test_tensors_with_hooks_keep_them():
    asked = []

    def unpack(tensor):
        asked.append(tensor)
        return tensor

    def function(x):
        with saved_tensors_hooks(lambda tensor: tensor, unpack):
            return x.tanh().tanh()

    for pipe, x in compare([Between(function), nn.Linear(3, 3)]):
        asked.clear()
        pipe.step(x, targets(2), mean_loss)
    assert len(asked) == 2


def test_an_inner_checkpoint_is_recomputed_once():
    runs = []

    def function(x):
        runs.append(1)
        return x.tanh().tanh()

    inner = Between(lambda x: checkpoint(function, x, use_reentrant=False))
    for pipe, x in compare([inner, nn.Linear(3, 3)]):
        runs.clear()
        pipe.step(x, targets(2), mean_loss)
    assert len(runs) == 2


def written(layer_function):
    """A pipeline with a layer that writes to what it has saved; the plain module refuses it."""
    plain = nn.Sequential(Between(layer_function), nn.Linear(3, 3)).double()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mean_loss(plain(samples(2, 3)), targets(2)).backward()
    return GPipe(plain, [1, 1], devices=["cpu"] * 2, chunks=1, checkpoint="never", schedule="zb_h1", workers="never")


def test_writing_to_what_is_saved_is_refused_before_i():
    def function(x):
        y = x.tanh()
        z = y.tanh()
        y.mul_(2)
        return z

    pipe = written(function)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        pipe.step(samples(2, 3), targets(2), mean_loss)


def test_writing_to_what_is_saved_is_refused_within_i():
    def function(x):
        y = x.tanh()
        z = y.exp() * 1
        z.register_hook(lambda _: y.detach().mul_(2) * 0)
        return z

    pipe = written(function)
    with pytest.raises(RuntimeError, match="modified by an inplace operation, got version 1 instead of 0"):
        pipe.step(samples(2, 3), targets(2), mean_loss)


def test_a_tensor_that_a_layer_keeps_aside_is_refused():
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.aside = nn.Linear(3, 3), nn.Linear(3, 3), []

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x).exp()
            self.aside.append((x * 2).sum())
            return self.last(x.tanh())

    layer = Aside().double()
    pipe = GPipe(nn.Sequential(layer), [1], devices=["cpu"], schedule="zb_h1", checkpoint="never", workers="never")
    pipe.step(samples(2, 3), targets(2), mean_loss)
    with pytest.raises(RuntimeError, match="from the pipeline's outputs, got some from a tensor that"):
        layer.aside[0].backward()
