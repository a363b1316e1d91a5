"""Early recomputation without nodes: several backward passes of one graph, and nothing left to the collector."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gpipe_bench import is_recomputing
from tests.engine.support import Identity, Mix, Watch, on_cpu

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


class Notes(nn.Module):
    """Notes when its layers are recomputed, and when they begin their backward pass."""

    def __init__(self, log: list[str], j: int, *layers: nn.Module) -> None:
        super().__init__()
        self.log, self.j, self.layers = log, j, nn.Sequential(*layers)

    def forward(self, x):
        if is_recomputing():
            self.log.append(f"R{self.j}")
        x = self.layers(x)
        # the node that notes would stand between the view that is written to and who writes to it, and after Identity
        views = isinstance(self.layers[-1], (nn.Flatten, nn.Identity))
        return x if views else Identity.apply(x, lambda: self.log.append(f"B{self.j}"))


class Stop(nn.Module):
    """Lets no gradient pass."""

    def forward(self, x):
        return x.detach()


WRITING = [[nn.Linear(4, 4), nn.Flatten()], [nn.ReLU(inplace=True), nn.Linear(4, 4)], [nn.Linear(4, 4)]]
STOPPED = [[nn.Linear(4, 4)], [nn.Linear(4, 4)], [Stop(), nn.Linear(4, 4)]]
PASSING = [[nn.Linear(4, 4)], [nn.Identity()], [nn.Linear(4, 4)]]


@pytest.mark.parametrize("observed", [(), (1, 3)], ids=["unobserved", "observed"])
@pytest.mark.parametrize("workers", ["never", "always"])
@pytest.mark.parametrize("last", [None, nn.Tanh])
@pytest.mark.parametrize("partitions", [WRITING, STOPPED, PASSING], ids=["writing", "stopped", "passing"])
def test_every_batch_has_the_order_of_the_first(partitions, last, workers, observed):
    """Partitions whose end no hook on their output tells: it is replaced, never reached, or another's."""
    log, orders = [], []
    more = [[last()]] if last else []
    layers = nn.Sequential(*(Notes(log, j, *copy.deepcopy(each)) for j, each in enumerate([*partitions, *more])))
    pipe = on_cpu(layers, [1] * len(layers), chunks=M, checkpoint="except_last", workers=workers)
    for batch in range(5):
        with pipe.observe(Watch()) if batch in observed else nullcontext():
            loss = pipe(torch.linspace(-1, 1, 32).view(8, 1, 4)).square().sum()
        log.clear()
        loss.backward()
        orders.append(" ".join(log))
    assert orders == orders[:1] * 5
