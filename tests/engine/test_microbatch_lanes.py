"""The scheduled mode in one thread on a CPU: from the second batch on, a graph for each micro-batch, not for each task.

Nothing tells which of the two it was: the same bits, hooks, errors.
"""

from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.engine import pipeline
from gpipe_bench.engine.microbatch_lanes import MicroBatchLanes
from tests.engine.support import Affine, InPlace, Mix, Watch, assert_same, on_cpu, score, skip_pair, train_step

M, N = 4, 3
BATCHES = 3


def chain(*layers: nn.Module, **options):
    layers = layers or tuple(Mix() for _ in range(N))
    options = {"checkpoint": "never", "backward": "scheduled", "workers": "never", "chunks": M, **options}
    return on_cpu(nn.Sequential(*layers), [1] * len(layers), **options)


def last_step(pipe):
    """The last of three."""
    return [train_step(pipe, torch.ones(M, 3)) for _ in range(BATCHES)][-1]


def test_all_batches_but_the_first_have_a_graph_for_each_microbatch(used):
    last_step(chain())
    assert used() == BATCHES - 1


@pytest.mark.parametrize(
    "options",
    [{"workers": "always"}, {"checkpoint": "always"}, {"checkpoint": "except_last"}, {"transfer": "host"},
     {"backward": "autograd"}],
    ids=str,
)  # fmt: skip
def test_none_has_where_partitions_run_at_the_same_time_or_tasks_are_recomputed_or_copied(options, used):
    last_step(chain(**options))
    assert used() == 0


def test_nor_has_a_batch_that_is_observed(used):
    pipe = chain()
    with pipe.observe(Watch()):
        last_step(pipe)
    assert used() == 0


def test_one_partition_is_autograds_business(used):
    pipe = chain(Mix())
    pipe(torch.ones(M, 3)).sum().backward(retain_graph=True)
    assert used() == 0


@pytest.fixture
def spans(monkeypatch):
    """Where the graphs of the last batch began."""
    found: list[tuple[int, ...]] = []

    class Noted(MicroBatchLanes):
        def __init__(self, *args) -> None:
            found.append(args[-1])
            super().__init__(*args)

    monkeypatch.setattr(pipeline, "MicroBatchLanes", Noted)
    return lambda: found[-1]


def heavy(count: int) -> list[nn.Module]:
    """Layers whose weights are five times what they pass on."""
    return [nn.Linear(4, 4) for _ in range(count)]


def test_weights_whose_gradients_would_take_more_memory_have_more_graphs(spans):
    pipe = chain(*heavy(8), chunks=8)
    for _ in range(2):
        pipe(torch.ones(8, 4)).sum().backward()
    assert spans() == (0, 5)


def test_no_graph_ends_where_a_skip_passes(used):
    """One graph would take too much memory, and more of them nowhere end."""
    (stash, pop), layers = skip_pair(), heavy(8)
    pipe = chain(nn.Sequential(layers[0], stash), *layers[1:7], nn.Sequential(pop, layers[7]), chunks=8)
    for _ in range(2):
        pipe(torch.ones(8, 4)).sum().backward()
    assert used() == 0


@pytest.mark.parametrize("training", [True, False])
def test_each_mode_of_training_has_its_own_first_batch(training, used):
    pipe = chain()
    last_step(pipe)
    before = used()
    pipe.train(training)
    train_step(pipe, torch.ones(M, 3))
    assert used() - before == training


def test_what_a_mode_of_training_holds_is_its_own():
    """Eval mode drops nothing, and so holds less within a task; spans of training go by what training holds."""
    pipe = chain(*(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)) for _ in range(2)))
    for training in (True, False):
        pipe.train(training)
        pipe(torch.ones(M, 4)).sum().backward()
    for stage in pipe._stages:
        assert stage.sizes[True].inner > stage.sizes[False].inner


class Skipping(nn.Module):
    """Two outputs, one of which may have no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, x):
        return (x[0] + self.mix(x[1]), x[1]) if isinstance(x, tuple) else (self.mix(x), x * 2)


def skips():
    stash, pop = skip_pair()
    return nn.Sequential(Mix(), stash), Mix(), nn.Sequential(pop, Mix())


MODELS = {
    "chain": lambda: [Mix() for _ in range(N)],
    "skips": skips,
    "pairs": lambda: [Skipping(), Skipping(), Skipping()],
    "in place": lambda: [Affine(), InPlace(), Affine()],
    "in place at the inputs": lambda: [nn.Sequential(InPlace(), Affine()), Mix()],
    "no parameters": lambda: [nn.Tanh(), Mix(), nn.Tanh()],
    "dropout": lambda: [nn.Sequential(Mix(), nn.Dropout(0.4)) for _ in range(N)],
}


@pytest.mark.parametrize("clock_cycle", [True, False])
@pytest.mark.parametrize("differentiable", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_those_of_workers_to_the_bit_whatever_they_are_added_to(model, differentiable, clock_cycle):
    torch.manual_seed(1)
    layers = MODELS[model]()
    found = []
    for workers in ("always", "never"):
        torch.manual_seed(2)
        options = {"workers": workers, "components": Components(clock_cycle=clock_cycle)}
        pipe = chain(*copy.deepcopy(layers), **options)
        inputs = []
        for seed in range(BATCHES):  # whose gradients are added up
            x = torch.randn(2 * M + 1, 3, generator=torch.Generator().manual_seed(seed)) + 0.1
            inputs.append(x.requires_grad_(differentiable))
            score(pipe(x)).backward()
        found.append([each.grad for each in (*pipe.parameters(), *inputs)])
    for here, there in zip(*found, strict=True):
        assert (here is None and there is None) or torch.equal(here, there)


@pytest.mark.parametrize("workers", ["always", "never"])
def test_hooks_run_once_for_each_microbatch(workers):
    pipe = chain(workers=workers)
    seen = Counter()
    for name, parameter in pipe.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: seen.update([name]))
    for batch in range(1, BATCHES + 1):
        train_step(pipe, torch.ones(M, 3))
        assert set(seen.values()) == {M * batch}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda loss: loss.backward(retain_graph=True), "got retain_graph=True; add the losses up"),
        (lambda loss: loss.backward(create_graph=True), "second derivatives must not pass"),
        (lambda loss: (loss.backward(), loss.backward()), "second"),
    ],
)
def test_what_is_refused_is_refused_here_too_and_does_no_harm(how, message, used):
    plain = nn.Sequential(*(Mix() for _ in range(N)))
    pipe = chain(*copy.deepcopy(plain))
    last_step(pipe)
    with pytest.raises(RuntimeError, match=message):
        how(score(pipe(torch.ones(M, 3))))
    assert_same(train_step(pipe, torch.ones(M, 3)), train_step(plain, torch.ones(M, 3)))
    assert used() == BATCHES + 1


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise KeyError("broken")


class Breaks(nn.Module):
    broken = False

    def forward(self, x):
        return Fails.apply(x) if self.broken else x * 1


def test_an_exception_of_a_backward_pass_comes_out_and_the_next_batch_is_well(used):
    breaks = Breaks()
    pipe = chain(Mix(), nn.Sequential(Mix(), breaks), Mix())
    expected = last_step(pipe)
    pipe.zero_grad()
    breaks.broken = True
    with pytest.raises(KeyError, match="broken"):
        pipe(torch.ones(M, 3)).sum().backward()
    breaks.broken = False
    assert_same(train_step(pipe, torch.ones(M, 3)), expected)
    assert used() == BATCHES + 1


def test_an_exception_of_a_forward_pass_comes_out_of_the_call():
    class Raises(Mix):
        raises = False

        def forward(self, x):
            if self.raises:
                raise ValueError("no more")
            return super().forward(x)

    layer = Raises()
    pipe = chain(Mix(), layer, Mix())
    last_step(pipe)
    layer.raises = True
    with pytest.raises(ValueError, match="no more"):
        pipe(torch.ones(M, 3))


class Aside(Mix):
    """Keeps a tensor of its graph."""

    def forward(self, x):
        self.kept = (x * x).sum()
        return super().forward(x)


def test_a_layer_that_keeps_tensors_of_its_graph_has_a_graph_for_each_task_in_every_batch(used):
    layer = Aside()
    pipe = chain(Mix(), layer, Mix())
    for _ in range(BATCHES):
        output = pipe(torch.ones(M, 3)).sum()
        with pytest.raises(RuntimeError, match="a tensor that a layer keeps aside"):
            (output + layer.kept).backward()
    assert used() == 0


def test_a_micro_batch_is_freed_before_the_next_one_runs_backward():
    """Of what the forward pass keeps for the backward pass, as many micro-batches are left as are still to come."""
    kept: list[set[int]] = []
    alive: set[int] = set()
    made = iter(range(10**6))

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.held = Thing(next(made))
            return x * 1

        @staticmethod
        def backward(ctx, grad):
            kept.append(set(alive))
            return grad

    class Thing:
        def __init__(self, number: int) -> None:
            self.number = number
            alive.add(number)

        def __del__(self) -> None:
            alive.discard(self.number)

    class Holds(Mix):
        def forward(self, x):
            return Held.apply(super().forward(x))

    pipe = chain(Holds(), Holds())
    for _ in range(2):
        kept.clear()
        pipe(torch.ones(M, 3)).sum().backward()
    assert [len(each) for each in kept[::2]] == [2 * count for count in range(M, 0, -1)]
    assert not alive
