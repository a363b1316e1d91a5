"""What the graph of a task keeps, as its nodes tell it, and who does not tell: then each task has its own graph."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from gpipe_bench.engine.keeping import Kept, kept_by
from gpipe_bench.engine.spans import Sizes
from tests.engine.support import on_cpu

M = 4


def chain(*layers: nn.Module):
    options = {"checkpoint": "never", "backward": "scheduled", "workers": "never", "chunks": M}
    return on_cpu(nn.Sequential(*layers), [1] * len(layers), **options)


class Product(torch.autograd.Function):
    """A function in Python, which may keep anything."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * x * grad


class Call(nn.Module):
    """Calls a function of a tensor."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def recomputed(x):
    return checkpoint(torch.sin, x.cos(), use_reentrant=False)


VALUE = 4 * 4
"""Bytes of a micro-batch."""

KEPT = {
    # (inputs, outputs, inner)
    "an output that the next task takes, too": (lambda: [nn.ReLU()], (VALUE, VALUE, 0)),
    "what an activation needs": (lambda: [nn.GELU()], (VALUE, 0, VALUE)),
    "once, what two need": (lambda: [nn.GELU(), nn.Linear(4, 4)], (VALUE, 0, 2 * VALUE)),
    "a view is no other memory": (
        lambda: [Call(lambda x: x.view(-1)), nn.GELU(), nn.Unflatten(0, (1, 4))], (VALUE, 0, VALUE),
    ),
    "a mask": (lambda: [nn.Dropout(0.5)], (VALUE, 0, VALUE)),
    "a function in Python does not tell": (lambda: [Call(Product.apply), nn.ReLU()], None),
    "nor hooks that keep it": (lambda: [Call(recomputed)], None),
    "nor a sparse tensor within": (lambda: [Call(lambda x: torch.sparse.mm(torch.eye(4).to_sparse(), x.T).T)], None),
    "nor nested ones": (lambda: [Call(nested)], None),
}  # fmt: skip


def nested(x):
    both = torch.nested.as_nested_tensor([x, x], layout=torch.jagged)
    return torch.cat(torch.relu(both).unbind())


@pytest.mark.parametrize("name", KEPT)
def test_what_tasks_keep_is_what_their_nodes_have_saved(name, used):
    layers, kept = KEPT[name]
    pipe = chain(*(nn.Sequential(nn.Linear(4, 4), *layers()) for _ in range(2)))
    for _ in range(2):
        pipe(torch.ones(M, 4)).sum().backward()
    assert used() == (kept is not None)
    sizes = [stage.sizes.get(True) for stage in pipe._stages]
    if kept is None:
        assert sizes == [None, None]
    else:
        inputs, outputs, inner = kept
        weights = sum(weight.nbytes for weight in pipe[0].parameters())
        assert sizes == [
            Sizes(weights, 0, VALUE, inner, 0, outputs), Sizes(weights, VALUE, VALUE, inner, inputs, outputs),
        ]  # fmt: skip


def test_a_write_to_a_view_does_not_tell_what_it_keeps():
    x = torch.ones(4, requires_grad=True)
    y = x * 2
    y[:2].mul_(torch.ones(2))
    assert type(y.grad_fn).__name__ == "CopySlices"
    assert kept_by([y.sin().grad_fn], [], [], []) == Kept(0, 0, VALUE)
    assert kept_by([y.sin().grad_fn, y.grad_fn], [], [], []) is None


def test_nor_does_a_function_of_an_extension():
    assert kept_by([type("CppFunction", (), {})()], [], [], []) is None


class Elsewhere(torch.Tensor):
    """A tensor whose memory is another one's."""

    @staticmethod
    def __new__(cls, own):
        made = torch.Tensor._make_wrapper_subclass(cls, own.shape, dtype=own.dtype, requires_grad=own.requires_grad)
        made.own = own
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        args = tree_map_only(cls, lambda x: x.own, args)
        return tree_map_only(torch.Tensor, cls, func(*args, **(kwargs or {})))


class Unused(nn.Module):
    """Has a weight that it does not use."""

    def __init__(self, weight) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return x * 2


UNUSUAL = {
    "sparse": lambda: [nn.Linear(4, 4), Call(torch.Tensor.to_sparse), Call(torch.Tensor.to_dense)],
    "a wrapper passes": lambda: [nn.Linear(4, 4), Call(lambda x: Elsewhere(x.detach())), Call(lambda x: x.own * 2)],
    "a wrapper as a weight": lambda: [nn.Linear(4, 4), Unused(nn.Parameter(Elsewhere(torch.ones(2))))],
    "a weight that is not made yet": lambda: [nn.Linear(4, 4), Unused(nn.UninitializedParameter())],
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_tensors_without_memory_of_their_own_have_a_graph_for_each_task(name, used):
    plain = nn.Sequential(*UNUSUAL[name](), nn.Linear(4, 4))
    parts = UNUSUAL[name]()
    parts[0].load_state_dict(plain[0].state_dict())
    last = copy.deepcopy(plain[-1])
    pipe = chain(*parts, last)
    for _ in range(2):
        pipe(torch.ones(M, 4)).sum().backward()
        plain(torch.ones(M, 4)).sum().backward()
    torch.testing.assert_close(last.weight.grad, plain[-1].weight.grad)
    assert used() == 0
