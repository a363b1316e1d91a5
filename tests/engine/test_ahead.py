"""Early recomputation without nodes: several backward passes of one graph, and nothing left to the collector."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from gpipe_bench import is_recomputing
from tests.engine.support import Mix, Watch, on_cpu

M, N = 4, 3


class Breaks(Mix):
    """Raises in one of its recomputations or backward passes, counted from the last time that it was armed."""

    where, left = "", 0

    def arm(self, where: str, left: int) -> None:
        self.where, self.left = where, left

    def count(self, where: str) -> None:
        self.left -= where == self.where
        if where == self.where and self.left == 0:
            raise KeyError(where)

    def forward(self, x):
        if is_recomputing():
            self.count("recompute")
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.count("backward"))
        return x


def chain(**options):
    torch.manual_seed(0)
    return on_cpu(nn.Sequential(*(Breaks() for _ in range(N))), [1] * N, chunks=M, **options)


def backward(pipe, watch, loss) -> tuple[str, list[torch.Tensor | None]]:
    pipe.zero_grad()
    watch.seen.clear()
    loss.backward(retain_graph=True)
    return watch.order("RB"), [parameter.grad.clone() for parameter in pipe.parameters()]


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
@pytest.mark.parametrize("where", ["recompute", "backward"])
@pytest.mark.parametrize("j", range(N))
@pytest.mark.parametrize("left", range(1, M))
@pytest.mark.parametrize("batches", [0, 1])
def test_after_an_exception_a_retained_graph_is_run_backward_in_order(checkpoint, where, j, left, batches):
    pipe, watch = chain(checkpoint=checkpoint), Watch()
    for _ in range(batches):
        pipe(torch.linspace(-1, 1, 24).view(8, 3))
    with pipe.observe(watch):
        loss = pipe(torch.linspace(-1, 1, 24).view(8, 3)).sum()
        order, expected = backward(pipe, watch, loss)
        pipe.partitions[j][0].arm(where, left)
        with pytest.raises(KeyError, match=where):
            backward(pipe, watch, loss)
        for _ in range(2):
            again, found = backward(pipe, watch, loss)
            assert again == order
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Elsewhere(nn.Module):
    """Made by a thread of its own, whose nodes have numbers of their own."""

    def __init__(self):
        super().__init__()
        self.affine = nn.Linear(3, 3)

    def forward(self, x):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(self.affine, x).result()


@pytest.mark.parametrize("place", range(N))
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_layer_whose_numbers_are_its_own_changes_no_gradients(checkpoint, place):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 3) for _ in range(N)]
    layers[place] = Elsewhere()
    plain, x = nn.Sequential(*layers), torch.linspace(-1, 1, 24).view(8, 3)
    pipe = on_cpu(copy.deepcopy(plain), [1] * N, chunks=M, checkpoint=checkpoint, workers="never")
    for module in (plain, pipe):
        for _ in range(2):
            module(x).square().sum().backward()
    for own, expected in zip(pipe.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, expected.grad)


@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_batch_leaves_nothing_to_the_collector(checkpoint):
    pipe = chain(checkpoint=checkpoint)
    for _ in range(2):
        pipe(torch.ones(8, 3)).sum().backward()
    gc.collect()
    gc.disable()
    try:
        pipe(torch.ones(8, 3)).sum().backward()
        assert gc.collect() == 0
    finally:
        gc.enable()
