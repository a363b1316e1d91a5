"""W: which weights branch off where, and what autograd does for each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpipe_bench import GPipe
from gpipe_bench.engine.runtime.split import WeightsLater, backward_inputs
from tests.engine.steps import SPLIT, mean_loss, samples, scheduled, step, targets
from tests.engine.support import assert_same

pytestmark = pytest.mark.usefixtures("no_gc")
SEEDS = range(12)


class Tangle(nn.Module):
    """Linear layers, each of which reads the values of some before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.linears = nn.ModuleList(nn.Linear(3, 3, bias=draw.random() < 0.5) for _ in range(draw.randint(2, 8)))
        self.reads = [draw.sample(range(k + 1), draw.randint(1, min(k + 1, 3))) for k in range(len(self.linears))]
        # Some layers get the gradient of a weight of theirs from operators of their own.
        self.scales = nn.ParameterList(torch.rand(3) for _ in self.linears if draw.random() < 0.5)

    def forward(self, x: Tensor) -> Tensor:
        values = [x]
        for k, linear in enumerate(self.linears):
            read = torch.stack([values[index] for index in self.reads[k]]).sum(0)
            scale = self.scales[k].exp() if k < len(self.scales) else 1
            values.append(torch.tanh(linear(read)) * scale)
        return torch.stack(values).sum(0)


@pytest.mark.parametrize("seed", SEEDS)
def test_gradients_of_tangled_layers(seed):
    torch.manual_seed(seed)
    plain = nn.Sequential(*(Tangle(4 * seed + j) for j in range(4))).double()
    pipe = scheduled(plain, [2, 2], "zb_h1", chunks=3, checkpoint="never", workers="never")
    assert_same(step(pipe, samples(7, 3), targets(7)), step(plain, samples(7, 3), targets(7)))


@pytest.mark.parametrize("schedule", SPLIT)
def test_w_is_one_task_of_autograd(schedule):
    """As a checkpoint within a layer shows, which PyTorch runs again for each task."""

    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears, self.runs = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)), 0

        def run(self, x: Tensor) -> Tensor:
            self.runs += 1
            return torch.stack([linear(x).tanh() for linear in self.linears]).sum(0)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.run, x, use_reentrant=False)

    layer = Beside()
    layers = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3), nn.Linear(3, 3)).double()
    pipe = scheduled(layers, [1] * 4, schedule, chunks=1, checkpoint="never", workers="never")
    pipe.step(samples(2, 3), targets(2), mean_loss)
    forward, inputs, weights = 1, 1, 1
    assert layer.runs == forward + inputs + weights


def halves(model: nn.Module, x: Tensor) -> WeightsLater:
    """I of a model; gives what W has to do."""
    x = x.requires_grad_() * 1
    y = model(x)
    cut = backward_inputs([get_gradient_edge(y)], [torch.ones_like(y)], [get_gradient_edge(x)])
    assert cut is not None
    cut[1].free_saved()
    return cut[1]


class Walks:
    """The engine of autograd; counts the nodes behind the roots of its calls, over which it walks."""

    def __init__(self) -> None:
        self.engine, self.nodes = torch.autograd.Variable._execution_engine, 0

    def run_backward(self, roots: Sequence[Tensor | GradientEdge], *args: Any, **options: Any) -> Any:
        todo = [(root if isinstance(root, GradientEdge) else get_gradient_edge(root)).node for root in roots]
        found = set()
        while todo:
            node = todo.pop()
            if node not in found:
                found.add(node)
                todo += [each for each, _ in node.next_functions if each is not None]
        self.nodes += len(found)
        return self.engine.run_backward(roots, *args, **options)


def test_nodes_that_autograd_walks_over_in_w_grow_with_the_layers_and_no_faster(monkeypatch):
    def walked(layers: int) -> int:
        blocks = (nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh()) for _ in range(layers))
        later = halves(nn.Sequential(*blocks), torch.rand(2, 3))
        walks = Walks()
        with monkeypatch.context() as patch:
            patch.setattr(torch.autograd.Variable, "_execution_engine", walks)
            later.run()
        return walks.nodes

    few, some, many = map(walked, (4, 8, 12))
    assert many - some == some - few


class Operators(TorchDispatchMode):
    """Notes which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("chunks", [1, 2])
def test_w_computes_no_gradient_of_an_input_and_copies_none_of_a_weight(chunks):
    convolutions = [nn.Conv1d(3, 3, 1, bias=False) for _ in range(3)]
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(3)), *convolutions)
    for _ in range(chunks):
        later = halves(model, torch.rand(2, 3, 5))
        with Operators() as operators:
            later.run()
        assert operators.names.count("aten::mm") == 3
        assert operators.names.count("aten::convolution_backward") == 3
        assert not {"aten::clone", "aten::copy_"} & {*operators.names}


class Watched(nn.Module):
    """Gives an activation between two layers to ``watch``."""

    def __init__(self, watch: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.one, self.other, self.watch = nn.Linear(3, 3), nn.Linear(3, 3), watch

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.one(x)
        self.watch(hidden)
        return self.other(hidden)


def watched(watch: Callable[[Tensor], object]) -> tuple[nn.Sequential, GPipe]:
    plain = nn.Sequential(Watched(watch), nn.Linear(3, 3)).double()
    return plain, scheduled(plain, [1, 1], "zb_h1", chunks=1, checkpoint="never", workers="never")


def test_hooks_of_activations_run_once():
    grads: list[Tensor] = []

    def double(grad: Tensor) -> Tensor:
        grads.append(grad)
        return grad * 2

    plain, pipe = watched(lambda hidden: hidden.register_hook(double))
    found = step(pipe, samples(2, 3), targets(2))
    assert len(grads) == 1
    assert_same(found, step(plain, samples(2, 3), targets(2)))


def test_activations_retain_their_gradient_once():
    kept: list[Tensor] = []

    def retain(hidden: Tensor) -> None:
        hidden.retain_grad()
        kept.append(hidden)

    plain, pipe = watched(retain)
    step(pipe, samples(2, 3), targets(2))
    step(plain, samples(2, 3), targets(2))
    torch.testing.assert_close(kept[0].grad, kept[1].grad)


def test_a_hook_after_a_node_changes_the_gradients_of_its_weights():
    def double(grads: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...]:
        return tuple(None if grad is None else grad * 2 for grad in grads)

    plain, pipe = watched(lambda hidden: hidden.grad_fn.register_hook(double))
    assert_same(step(pipe, samples(2, 3), targets(2)), step(plain, samples(2, 3), targets(2)))


@pytest.mark.filterwarnings("ignore:Error detected in torch..autograd..AccumulateGrad")
def test_anomalies_are_found_in_w():
    class Infinite(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            # The gradient of the weight is zero times infinite.
            return ((x + torch.inf) * self.weight).clamp(max=1)

    later = halves(Infinite(), torch.rand(2, 3))
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="Error detected in MulBackward0"),
        pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"),
    ):
        later.run()


class Scale(torch.autograd.Function):
    """(x, weight, unused) -> x * weight and x + weight."""

    @staticmethod
    def forward(ctx, x, weight, _):
        ctx.save_for_backward(x, weight)
        return x * weight, x + weight

    @staticmethod
    def backward(ctx, product, total):
        x, weight = ctx.saved_tensors
        return product * weight + total, product * x + total, None


class Custom(nn.Module):
    """A custom function with a weight, one output of which is not used; a hook changes the gradient of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.factors = nn.Parameter(torch.ones(2, 3)), count(2)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = Scale.apply(x, self.weight, "unused")
        hidden.register_hook(lambda grad: grad * next(self.factors))
        return hidden.tanh()


def test_a_custom_function_takes_what_a_hook_makes_of_its_gradient_in_i():
    """The hook runs again in W, and would give another gradient."""
    plain = nn.Sequential(nn.Linear(3, 3), Custom(), nn.Linear(3, 3)).double()
    pipe = scheduled(plain, [2, 1], "zb_h1", chunks=1, checkpoint="never", workers="never")
    found = step(pipe, samples(2, 3), targets(2))
    plain[1].factors = count(2)
    assert_same(found, step(plain, samples(2, 3), targets(2)))


@pytest.mark.parametrize("kept", ["gradient", "input"])
def test_a_graph_that_a_layer_keeps_aside_holds_neither_after_w(kept):
    held: list[StorageWeakRef] = []
    aside: list[Tensor] = []

    def watch(hidden: Tensor) -> None:
        aside.append(hidden * 1)
        if kept == "gradient":
            hidden.register_hook(lambda grad: held.append(StorageWeakRef(grad.untyped_storage())))

    class Shifted(Watched):
        def forward(self, x: Tensor) -> Tensor:
            x = x + 1
            if kept == "input":
                held.append(StorageWeakRef(x.untyped_storage()))
            return super().forward(x)

    layers = nn.Sequential(Shifted(watch), Shifted(watch)).double()
    pipe = scheduled(layers, [1, 1], "zb_h1", chunks=2, checkpoint="never", workers="never")
    pipe.step(samples(2, 3), targets(2), mean_loss)
    assert held
    assert all(each.expired() for each in held)
