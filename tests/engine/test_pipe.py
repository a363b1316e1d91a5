"""Pipe: partitions by placement, several inputs, values gathered."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from gpipe_bench import NoChunk, Pipe, PipeSequential, WithDevice, partition_model
from gpipe_bench.engine.placed import placed_partitions
from tests.engine.support import Do

X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))


class Add(nn.Module):
    """(x, y, *, scale, mask) -> (tensor, scale)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, y, scale=1, mask=None):
        total = self.linear(x) + scale * y
        return (total if mask is None else total * mask), scale


class Last(nn.Module):
    """(x, scale) -> (tensor, scale, None, scalar)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x, scale):
        return self.linear(x), scale, None, x.sum()


def layers():
    torch.manual_seed(0)
    return nn.Sequential(Add(), Last())


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4), nn.Tanh())


@pytest.mark.parametrize("balance", [None, [1, 1]])
@pytest.mark.parametrize("checkpoint", ["always", "except_last", "never"])
def test_several_inputs_and_outputs(checkpoint, balance):
    plain = layers()
    pipe = Pipe(copy.deepcopy(plain), chunks=3, checkpoint=checkpoint, balance=balance)
    mask = torch.tensor([1.0, 0.0, 2.0, 1.0])
    expected = plain[0](X, 2 * X, 3, mask)[0]
    out, scales, nothing, sums = pipe(X, 2 * X, scale=3, mask=NoChunk(mask)).local_value()
    torch.testing.assert_close(out, plain[1].linear(expected))
    torch.testing.assert_close(sums, torch.stack([piece.sum() for piece in expected.chunk(3)]))
    assert scales == [3, 3, 3]
    assert nothing == [None, None, None]
    (out.sum() + sums.sum()).backward()
    (plain[1].linear(expected).sum() + expected.sum()).backward()
    for one, other in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_one_tensor_in_one_tensor_out():
    plain = chain()
    pipe = Pipe(copy.deepcopy(plain), 2)
    assert pipe.balance == [4]
    result = pipe(X)
    torch.testing.assert_close(result.local_value(), plain(X))
    assert result.to_here() is result.local_value()


class Nested(nn.Module):
    """x -> (x, (x, 1), [x, x], {"a": None}), or a part of it."""

    def __init__(self, pick=lambda given: given):
        super().__init__()
        self.pick = pick

    def forward(self, x):
        return self.pick((x, (x, 1), [x, x][: len(x)], {"a": None}))


def test_results_within_results_come_as_each_microbatch_gave_them():
    pieces = X.chunk(3)
    assert [len(piece) for piece in pieces] == [2, 2, 1]
    leaf = X.clone().requires_grad_()
    whole, pairs, lists, dicts = Pipe(nn.Sequential(Nested()), 3, "always")(leaf).local_value()
    torch.testing.assert_close(whole, X)
    torch.testing.assert_close(pairs, [(piece, 1) for piece in pieces])
    torch.testing.assert_close(lists, [[piece, piece][: len(piece)] for piece in pieces])
    assert dicts == [{"a": None}] * 3
    (pairs[1][0] * 3).sum().backward()
    torch.testing.assert_close(leaf.grad, torch.tensor([0.0, 0, 3, 3, 0])[:, None].expand(5, 4))


PICKS = {
    "tuple": (lambda given: given[:1], lambda: (X,)),
    "list": (lambda given: [given[0], 1], lambda: [X, [1, 1, 1]]),
    "dict": (lambda given: {"x": given[0], "y": given[3]}, lambda: {"x": X, "y": [{"a": None}] * 3}),
    "nothing": (lambda _: None, lambda: [None] * 3),
    "number": (lambda _: 5, lambda: [5, 5, 5]),
}


@pytest.mark.parametrize("name", PICKS)
def test_the_outermost_container_stays(name):
    pick, expected = PICKS[name]
    found = Pipe(nn.Sequential(Nested(pick)), 3)(X).local_value()
    assert type(found) is type(expected())
    torch.testing.assert_close(found, expected())


def test_results_of_several_forms():
    pipe = Pipe(nn.Sequential(Nested(lambda given: given[: len(given[0])])), 3)
    with pytest.raises(TypeError, match="results of all micro-batches must have one form"):
        pipe(X)


def test_a_tensor_from_some_microbatches_only():
    pipe = Pipe(nn.Sequential(Nested(lambda given: (given[0], given[0] if len(given[0]) > 1 else None))), 3)
    with pytest.raises(TypeError, match="must have one form, got NoneType and Tensor in one place"):
        pipe(X)


def test_a_small_batch_gives_fewer_microbatches():
    scales = Pipe(layers(), chunks=8)(X[:2], X[:2]).local_value()[1]
    assert scales == [1, 1]


def test_parameters_are_called_as_in_the_module():
    plain = chain()
    pipe = Pipe(copy.deepcopy(plain), 2, balance=[2, 2])
    assert list(pipe.state_dict()) == list(plain.state_dict())
    pipe.load_state_dict(plain.state_dict())


def test_consecutive_layers_on_one_device_are_a_partition():
    module = nn.Sequential(
        nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2, device="meta"), nn.ReLU(), nn.Linear(2, 2)
    )
    sizes, devices = placed_partitions(module)
    assert sizes == [3, 2, 1]
    assert [device.type for device in devices] == ["cpu", "meta", "cpu"]


def test_with_device_says_where_a_layer_without_parameters_runs():
    module = nn.Sequential(nn.Linear(2, 2), WithDevice(nn.ReLU(), "meta"), nn.Linear(2, 2, device="meta"))
    assert placed_partitions(module)[0] == [1, 2]
    pipe = Pipe(nn.Sequential(nn.Linear(4, 4), WithDevice(nn.Linear(4, 4), "cpu")))
    assert list(pipe.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert pipe(X).local_value().shape == (5, 4)


def test_sequential_of_several_inputs():
    first, last = layers()
    torch.testing.assert_close(PipeSequential(first, last)(X, X, scale=2)[0], last.linear(first(X, X, 2)[0]))


def doubled(x):
    return x, 2 * x


class Sum(nn.Module):
    def forward(self, x, y):
        return x + y


def test_a_sequential_among_the_layers_hands_on_several_values():
    """As partition_model makes them, and as PyTorch's Pipe took them."""
    inner = nn.Sequential(nn.Linear(4, 4), Do(doubled), Sum())
    calls = []
    pipe = Pipe(nn.Sequential(inner, nn.Linear(4, 2)))
    inner.register_forward_hook(lambda *_: calls.append("inner"))
    torch.testing.assert_close(pipe(X).local_value(), pipe[1](3 * inner[0](X)))
    assert calls == ["inner"]
    assert list(pipe.state_dict()) == ["0.0.weight", "0.0.bias", "1.weight", "1.bias"]
    inner.eval()
    assert not pipe[0].training


def test_a_model_in_partitions():
    plain = chain()
    placed = partition_model(plain, [1, 3], devices=["cpu", "cpu"])
    assert [len(partition) for partition in placed] == [1, 3]
    pipe = Pipe(placed, chunks=2, balance=[1, 1])
    torch.testing.assert_close(pipe(X).local_value(), plain(X))


def test_no_layers():
    pipe = Pipe(nn.Sequential())
    assert pipe(X).local_value() is X
    assert pipe(X, 42).local_value() == (X, 42)
    with pytest.raises(TypeError, match="inputs must hold at least one tensor to split, got int"):
        pipe(42)
    with pytest.raises(ValueError, match="input 0 must have a batch dimension"):
        pipe(torch.tensor(1.0))


def mixed():
    return nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))


def hooked(module=None):
    module = module or chain()
    module.register_forward_pre_hook(print)
    return module


REFUSED = {
    "two devices": (lambda: Pipe(mixed()), ValueError, "got child '0' on cpu, meta; move it with"),
    "no tensor": (lambda: Pipe(chain())(1, "a"), TypeError, "must hold at least one tensor to split, got int, str"),
    "a list": (
        lambda: Pipe(chain())([torch.rand(2, 3)]),
        TypeError,
        "or a list of ready-made micro-batches as MicroBatches",
    ),
    "only whole": (lambda: Pipe(chain())(NoChunk(X)), TypeError, "at least one tensor to split, got NoChunk"),
    "NoChunk": (lambda: NoChunk([X]), TypeError, "NoChunk must wrap a tensor, got list"),
    "elsewhere": (
        lambda: Pipe(layers())(X, X.to("meta")),
        ValueError,
        "input 1 must be on the first partition's device",
    ),
    "no batch": (lambda: Pipe(layers())(X, X.sum()), ValueError, "input 1 must have a batch dimension"),
    "unequal": (lambda: Pipe(layers(), 4)(X, X[:1]), ValueError, "got sizes [5, 1] in dimension 0, which give [1, 3]"),
    "uneven": (
        lambda: partition_model(chain(), [1, 1], ["cpu"] * 2),
        ValueError,
        "balance must add up to the 4 layers",
    ),
    "no device": (lambda: partition_model(chain(), [2, 2], ["cpu"]), IndexError, "at least 2 for 2 partitions"),
    "a hook of its own": (lambda: Pipe(hooked()), ValueError, "no hooks of its own, got ['forward_pre_hooks']"),
    "a hook of WithDevice": (
        lambda: Pipe(nn.Sequential(hooked(WithDevice(nn.ReLU(), "cpu")))),
        ValueError,
        "a WithDevice must have no hooks, got ['forward_pre_hooks']; register them on its layer",
    ),
    "in partitions": (lambda: partition_model(hooked(), [4], ["cpu"]), ValueError, "module must have no hooks"),
    "moved": (lambda: Pipe(chain()).cuda(), TypeError, "must stay on the devices it was made for"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=re.escape(message)):
        call()
