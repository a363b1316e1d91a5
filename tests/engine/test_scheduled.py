"""``backward='scheduled'``, which is ``schedule='gpipe'``: tasks run backward in the reversed order.

That it gives the results of the plain module is tested with everything else, see ``either_backward``; what holds for
every schedule is tested in ``test_schedules*.py``.
"""

from __future__ import annotations

import copy
import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from gpipe_bench import Components, is_recomputing
from tests.engine.support import (
    FACTORIAL,
    MODES,
    SOME,
    Mix,
    Watch,
    assert_same,
    grid,
    label,
    numbered,
    on_cpu,
    probe_pipe,
    score,
    train_step,
)

M, N = 4, 3


def chain(n: int = N, **options):
    return on_cpu(nn.Sequential(*(Mix() for _ in range(n))), [1] * n, chunks=M, backward="scheduled", **options)


def logged_step(**options):
    """(what each partition did in its backward pass, in which thread) of a chain of three."""
    log, threads = [], {}
    pipe = probe_pipe(N, log, threads, chunks=M, backward="scheduled", **options)
    output = pipe(numbered(M))
    log.clear()
    output.sum().backward()
    return [[name for name in log if name.endswith(f",{j}")] for j in range(N)], threads


@pytest.mark.parametrize("components", FACTORIAL, ids=label)
@pytest.mark.parametrize("checkpoint", MODES)
def test_every_partition_goes_from_the_last_microbatch_to_the_first(checkpoint, components):
    orders, _ = logged_step(checkpoint=checkpoint, components=components)
    recomputed = {"always": range(M), "except_last": range(M - 1), "never": ()}[checkpoint]
    for j, order in enumerate(orders):
        assert order == [f"{letter}{i},{j}" for i in range(M)[::-1] for letter in ("RB" if i in recomputed else "B")]


@pytest.mark.parametrize("early_recompute", [True, False])
def test_a_partition_recomputes_while_its_gradient_is_on_its_way_or_not_before_it_has_come(early_recompute):
    recomputed = threading.Event()
    seen = []

    class Last(Mix):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(self.wait)
            return y

        def wait(self, _):
            seen.append(recomputed.wait(30 if early_recompute else 0.1))

    class First(Mix):
        def forward(self, x):
            if is_recomputing():
                recomputed.set()
            return super().forward(x)

    components = Components(early_recompute=early_recompute)
    layers = nn.Sequential(First(), Last())
    pipe = on_cpu(layers, [1, 1], chunks=1, checkpoint="always", components=components, backward="scheduled")
    pipe(torch.ones(1, 3)).sum().backward()
    assert seen == [early_recompute]


@pytest.mark.parametrize("checkpoint", MODES)
def test_each_partition_runs_backward_in_its_own_thread(checkpoint):
    _, threads = logged_step(checkpoint=checkpoint)
    assert {name: thread for name, thread in threads.items() if name[0] == "B"} == {
        f"B{i},{j}": f"gpipe-worker-{j}" if j else "gpipe-batch" for i in range(M) for j in range(N)
    }


def test_without_the_clock_cycle_the_calling_thread_does_it_all():
    _, threads = logged_step(components=Components(clock_cycle=False))
    assert set(threads.values()) == {threading.current_thread().name}


class Meet(nn.Module):
    """Its backward pass of one micro-batch waits for that of another layer."""

    def __init__(self, barrier: threading.Barrier, microbatch: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.barrier, self.microbatch = barrier, microbatch

    def forward(self, x):
        y = x * self.weight
        if int(x.detach()[0, 0]) == self.microbatch:
            y.register_hook(self.meet)
        return y

    def meet(self, _):
        self.barrier.wait(timeout=30)


def test_partitions_on_the_cpu_run_backward_at_the_same_time():
    barrier = threading.Barrier(2)
    layers = [Meet(barrier, 1), Meet(barrier, 0)]
    pipe = on_cpu(nn.Sequential(*layers), [1, 1], chunks=2, checkpoint="never", backward="scheduled")
    pipe(numbered(2)).sum().backward()
    assert layers[0].weight.grad == 1
    assert not barrier.broken


@pytest.mark.parametrize("checkpoint", MODES)
def test_an_observer_sees_each_task_once(checkpoint):
    watch = Watch()
    pipe = chain(checkpoint=checkpoint, transfer="host")
    with pipe.observe(watch):
        pipe(torch.ones(M, 3).requires_grad_()).sum().backward()
    assert watch.names("FB") == sorted(grid("F", range(M), range(N)) + grid("B", range(M), range(N)))
    assert watch.names("Cc") == sorted(grid("C", range(M), range(1, N)) + grid("c", range(M), range(1, N)))
    assert {seen.finished for seen in watch.seen} == {1}


# --- what it cannot do ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("checkpoint", MODES)
class TestRefused:
    def test_a_second_backward_pass(self, checkpoint):
        output = chain(checkpoint=checkpoint)(torch.ones(M, 3))
        output[:1].sum().backward()
        with pytest.raises(RuntimeError, match="only one of its batch, got a second one"):
            output[1:].sum().backward()

    @pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
    def test_second_derivatives(self, checkpoint):
        pipe = chain(checkpoint=checkpoint)
        with pytest.raises(RuntimeError, match="second derivatives must not pass through a scheduled backward pass"):
            score(pipe(torch.ones(M, 3))).backward(create_graph=True)

    def test_gradients_of_chosen_tensors(self, checkpoint):
        pipe = chain(checkpoint=checkpoint)
        x = torch.ones(M, 3).requires_grad_()
        with pytest.raises(RuntimeError, match=r"must go to all parameters, got autograd.grad\(\)"):
            torch.autograd.grad(score(pipe(x)), x)

    def test_a_refused_batch_does_no_harm(self, checkpoint):
        plain = nn.Sequential(*(Mix() for _ in range(N)))
        pipe = on_cpu(copy.deepcopy(plain), [1] * N, chunks=M, checkpoint=checkpoint, backward="scheduled")
        with pytest.raises(RuntimeError):
            torch.autograd.grad(score(pipe(torch.ones(M, 3))), list(pipe.parameters()))
        assert_same(train_step(pipe, torch.ones(M, 3)), train_step(plain, torch.ones(M, 3)))


def test_a_graph_may_be_retained_for_what_comes_behind_the_pipeline():
    plain = nn.Sequential(*(Mix() for _ in range(N)))
    pipe = on_cpu(copy.deepcopy(plain), [1] * N, chunks=M, backward="scheduled")
    for model in (plain, pipe):
        score(model(torch.ones(M, 3))).backward(retain_graph=True)
    torch.testing.assert_close(gradients(pipe), gradients(plain))


class Aside(nn.Module):
    """Keeps a tensor made of its input for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept: list[torch.Tensor] = []

    def forward(self, x):
        self.kept.append((x * x).sum())
        return self.linear(x)


@pytest.mark.parametrize("workers", ["always", "never"])
@pytest.mark.parametrize("first", ["output", "aside", "aside alone"])
@pytest.mark.parametrize("where", ["layers", "batch"])
def test_a_tensor_kept_aside_raises_rather_than_lose_gradients(where, first, workers):
    aside = Aside()
    layers = [Mix(), aside, Mix()] if where == "layers" else [aside, Mix()]
    pipe = on_cpu(nn.Sequential(*layers), [1] * len(layers), chunks=M, checkpoint="never", backward="scheduled",
                  workers=workers)  # fmt: skip
    output = pipe(torch.ones(M, 3).requires_grad_(where == "batch")).sum()
    kept = sum(aside.kept)
    loss = {"output": output + kept, "aside": kept + output, "aside alone": kept}[first]
    with pytest.raises(
        RuntimeError, match=r"got some from a tensor that a layer keeps aside, .*leave out schedule and backward"
    ):
        loss.backward()


@pytest.mark.parametrize("workers", ["always", "never"])
def test_a_tensor_that_another_layer_has_from_there_raises_too(workers):
    aside = Aside()

    class Takes(Mix):
        def forward(self, x):
            return super().forward(x) + aside.kept[-1]

    pipe = on_cpu(nn.Sequential(Mix(), aside, Takes()), [1, 1, 1], chunks=1, checkpoint="never", backward="scheduled",
                  workers=workers)  # fmt: skip
    output = pipe(torch.ones(M, 3))
    with pytest.raises(RuntimeError, match="must come from the pipeline's outputs"):
        output.sum().backward()


def test_what_is_kept_aside_of_parameters_alone_gets_its_gradients():
    class Decays(Mix):
        def forward(self, x):
            self.kept = self.linear.weight.square().sum()
            return super().forward(x)

    torch.manual_seed(3)
    plain = nn.Sequential(Decays(), Decays()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint="never", backward="scheduled")
    for model in (plain, pipe):
        (score(model(torch.ones(4, 3, dtype=torch.float64))) + sum(layer.kept for layer in model)).backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))


# --- what autograd does around it ------------------------------------------------------------------------------------


@pytest.fixture
def pair():
    """The same model plain and as a pipeline."""
    plain = nn.Sequential(*(Mix() for _ in range(N))).double()
    return plain, on_cpu(copy.deepcopy(plain), [1] * N, chunks=M, backward="scheduled")


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def test_two_batches_in_one_loss(pair):
    for model in pair:
        x, y = torch.rand(2, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        (score(model(x)) * score(model(y))).backward()
    torch.testing.assert_close(*map(gradients, pair))


def test_a_microbatch_that_the_loss_leaves_out(pair):
    x = torch.rand(8, 3, dtype=torch.float64)
    for model in pair:
        score(model(x)[2:4]).backward()
    torch.testing.assert_close(*map(gradients, pair))


def test_gradients_accumulate_over_steps(pair):
    x = torch.rand(8, 3, dtype=torch.float64)
    for model in pair:
        for _ in range(3):
            score(model(x)).backward()
    torch.testing.assert_close(*map(gradients, pair))


def test_hooks_of_parameters_see_gradients_that_add_up(pair):
    x = torch.rand(8, 3, dtype=torch.float64)
    plain, pipe = pair
    seen = []
    pipe[1].linear.weight.register_hook(lambda grad: seen.append(grad.clone()))
    for model in pair:
        score(model(x)).backward()
    assert len(seen) == M
    torch.testing.assert_close(sum(seen), plain[1].linear.weight.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_pipeline_within_a_checkpoint(pair, use_reentrant):
    x = torch.rand(8, 3, dtype=torch.float64)
    for model in pair:
        leaf = x.clone().requires_grad_()
        score(torch_checkpoint(model, leaf, use_reentrant=use_reentrant)).backward()
    torch.testing.assert_close(*map(gradients, pair))


def test_layers_before_and_after_a_pipeline():
    def whole(model):
        return nn.Sequential(nn.Sequential(Mix()), model, nn.Sequential(Mix()))

    torch.manual_seed(3)
    plain = whole(nn.Sequential(Mix(), Mix()))
    around = copy.deepcopy(plain)
    around[1] = on_cpu(around[1], [1, 1], chunks=2, backward="scheduled")
    found, expected = train_step(around, torch.ones(4, 3)), train_step(plain, torch.ones(4, 3))
    torch.testing.assert_close(list(found.gradients.values()), list(expected.gradients.values()))


def test_a_pipeline_in_a_pipeline():
    torch.manual_seed(3)
    plain = nn.Sequential(Mix(), nn.Sequential(Mix(), Mix()), Mix())
    nested = copy.deepcopy(plain)
    nested[1] = on_cpu(nested[1], [1, 1], chunks=2, backward="scheduled")
    pipe = on_cpu(nested, [1, 2], chunks=2, checkpoint="never", backward="scheduled")
    found, expected = train_step(pipe, torch.ones(4, 3)), train_step(plain, torch.ones(4, 3))
    torch.testing.assert_close(list(found.gradients.values()), list(expected.gradients.values()))


@pytest.mark.parametrize("components", SOME, ids=label)
def test_gradients_do_not_depend_on_which_worker_is_slow(components):
    def dawdle(_):
        time.sleep(0.002)

    class Slow(Mix):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(dawdle)
            return y

    torch.manual_seed(5)
    plain = nn.Sequential(Mix(), Slow(), Mix())
    pipe = on_cpu(copy.deepcopy(plain), [1] * N, chunks=M, components=components, backward="scheduled")
    assert_same(train_step(pipe, torch.ones(7, 3)), train_step(plain, torch.ones(7, 3)))


# --- afterwards ------------------------------------------------------------------------------------------------------


def test_a_pipeline_that_has_worked_can_be_copied_and_pickled(pair):
    plain, pipe = pair
    x = torch.rand(8, 3, dtype=torch.float64)
    score(pipe(x)).backward()
    for twin in (copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))):
        assert_same(train_step(twin, x), train_step(plain, x))
