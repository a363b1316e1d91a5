"""What is particular to the runtime: the order and threads of tasks, W, and what a graph for each task rules out."""

from __future__ import annotations

import copy
import threading
import time
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from gpipe_bench import Components, is_recomputing
from gpipe_bench.schedules import SCHEDULES
from gpipe_bench.schedules.table import LOOP
from tests.engine.steps import ALL, DOUBLE, SPLIT, mean_loss, samples, scheduled, step, targets
from tests.engine.support import (
    MODES,
    SOME,
    Flags,
    Mix,
    Watch,
    assert_same,
    label,
    numbered,
    on_cpu,
    probe_pipe,
    score,
    train_step,
)

M, N = 4, 3
every_mode = pytest.mark.parametrize("checkpoint", MODES)
both_workers = pytest.mark.parametrize("workers", ["always", "never"])


def chain(n: int = 4) -> nn.Sequential:
    torch.manual_seed(4)
    return nn.Sequential(*(Mix() for _ in range(n))).double()


def called(**options):
    return on_cpu(chain(N), [1] * N, chunks=M, schedule="gpipe", **options)


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


# --- order and threads ----------------------------------------------------------------------------------------------


def logged_step(**options):
    """(what each partition did in its backward pass, in which thread) of a chain of three."""
    log, threads = [], {}
    pipe = probe_pipe(N, log, threads, chunks=M, schedule="gpipe", **options)
    output = pipe(numbered(M))
    log.clear()
    output.sum().backward()
    return [[name for name in log if name.endswith(f",{j}")] for j in range(N)], threads


@pytest.mark.parametrize("components", SOME, ids=label)
@every_mode
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
    pipe = on_cpu(layers, [1, 1], chunks=1, checkpoint="always", components=components, schedule="gpipe")
    pipe(torch.ones(1, 3)).sum().backward()
    assert seen == [early_recompute]


def test_each_partition_runs_backward_in_its_own_thread():
    _, threads = logged_step()
    assert {name: thread for name, thread in threads.items() if name[0] == "B"} == {
        f"B{i},{j}": f"gpipe-worker-{j}" if j else "gpipe-batch" for i in range(M) for j in range(N)
    }


def test_partitions_on_the_cpu_run_backward_at_the_same_time():
    """The backward pass of one micro-batch waits for that of another layer."""
    barrier = threading.Barrier(2)

    class Meet(Flags):
        def forward(self, x):
            y = super().forward(x)
            if int(x.detach()[0, 0]) == self.microbatch:
                y.register_hook(self.meet)
            return y

        def meet(self, _):
            barrier.wait(timeout=30)

    layers = [Meet(), Meet()]
    layers[0].microbatch, layers[1].microbatch = 1, 0
    pipe = on_cpu(nn.Sequential(*layers), [1, 1], chunks=2, checkpoint="never", schedule="gpipe")
    pipe(numbered(2)).sum().backward()
    assert layers[0].weight.grad == 1
    assert not barrier.broken


@pytest.mark.parametrize("schedule", DOUBLE)
def test_with_two_partitions_per_device_one_thread_runs_both(schedule):
    threads: list[set[str]] = [set() for _ in range(4)]
    layers = chain()
    for j, layer in enumerate(layers):
        layer.register_forward_hook(lambda *_, j=j: threads[j].add(threading.current_thread().name))
    scheduled(layers, [1] * 4, schedule, chunks=3).step(samples(6, 3), targets(6), mean_loss)
    other = 2 if schedule in LOOP else 3
    assert [len(names) for names in threads] == [1] * 4
    assert threads[0] == threads[other]
    assert len(set.union(*threads)) == 2


@pytest.mark.parametrize("components", SOME, ids=label)
def test_gradients_do_not_depend_on_which_worker_is_slow(components):
    class Slow(Mix):
        def forward(self, x):
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda _: time.sleep(0.002))
            return y

    torch.manual_seed(5)
    plain = nn.Sequential(Mix(), Slow(), Mix())
    pipe = on_cpu(copy.deepcopy(plain), [1] * N, chunks=M, components=components, schedule="gpipe")
    assert_same(train_step(pipe, torch.ones(7, 3)), train_step(plain, torch.ones(7, 3)))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_loss_is_computed_for_each_microbatch_beside_other_tasks(schedule):
    """In 1F1B and later ones the first backward pass comes before the last forward pass."""
    order, layers = [], chain()
    layers[3].register_forward_hook(lambda *_: order.append("F"))

    def loss(output, target):
        order.append("L")
        return mean_loss(output, target)

    pipe = scheduled(layers, [1] * 4, schedule, chunks=6, checkpoint="never")
    pipe.step(samples(6, 3), targets(6), loss)
    assert order == ["F", "L"] * 6


# --- I and W --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "zb_h1", "zb_v"])
@every_mode
def test_hooks_of_weights_run_once_for_each_microbatch(schedule, checkpoint):
    seen, plain = [], chain()
    pipe = scheduled(copy.deepcopy(plain), [1] * 4, schedule, chunks=3, checkpoint=checkpoint)
    pipe[1].linear.weight.register_hook(lambda grad: seen.append(grad.clone()))
    step(pipe, samples(7, 3), targets(7))
    assert len(seen) == 3
    torch.testing.assert_close(sum(seen), step(plain, samples(7, 3), targets(7)).gradients["1.linear.weight"])


@pytest.mark.parametrize("schedule", SPLIT)
def test_weights_wait_for_w(schedule):
    """Until the action W(i, j), no weight of partition j has a gradient of micro-batch i."""
    pipe = scheduled(chain(), [1] * 4, schedule, chunks=3, checkpoint="never", workers="never")
    counts, before, after = [0] * 4, [], []
    for j, layer in enumerate(pipe):
        layer.linear.weight.register_hook(lambda _, j=j: counts.__setitem__(j, counts[j] + 1))

    class Counts(Watch):
        def start(self, task):
            if task.kind == "backward_weights":
                before.append((task.partition, counts[task.partition]))
            return super().start(task)

        def finish(self, token, nbytes):
            super().finish(token, nbytes)
            if token.task.kind == "backward_weights":
                after.append((token.task.partition, counts[token.task.partition]))

    with pipe.observe(Counts()):
        pipe.step(samples(7, 3), targets(7), mean_loss)
    for j in range(4):
        assert [count for partition, count in before if partition == j] == [0, 1, 2]
        assert [count for partition, count in after if partition == j] == [1, 2, 3]


@pytest.mark.parametrize("selective", [False, True])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("schedule", ALL)
def test_a_checkpoint_within_a_layer_recomputes_once(schedule, mode, selective):
    """Also where backward passes are cut into I and W, and where it keeps the results of some operators."""
    runs = []
    kept = [torch.ops.aten.addmm.default]
    options = {"context_fn": partial(create_selective_checkpoint_contexts, kept)} if selective else {}

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
            self.layers.register_forward_pre_hook(lambda *_: runs.append(1))

        def forward(self, x):
            return torch_checkpoint(self.layers, x, use_reentrant=False, **options)

    plain = nn.Sequential(Mix(), Checkpointed(), Mix(), Mix()).double()
    expected = step(plain, samples(6, 3), targets(6))
    runs.clear()
    pipe = scheduled(plain, [1] * 4, schedule, chunks=3, checkpoint=mode)
    assert_same(step(pipe, samples(6, 3), targets(6)), expected)
    checkpointed = {"never": 0, "except_last": 2, "always": 3}[mode]
    assert len(runs) == 3 * 2 + checkpointed


# --- what it cannot do ----------------------------------------------------------------------------------------------


def second_backward_pass(pipe, x):
    output = pipe(x)
    output[:1].sum().backward()
    output[1:].sum().backward()


REFUSED = {
    "only one of its batch, got a second one": second_backward_pass,
    "second derivatives must not pass through a scheduled backward pass": lambda pipe, x: score(pipe(x)).backward(
        create_graph=True
    ),
    "must go to all parameters, got autograd.grad": lambda pipe, x: torch.autograd.grad(score(pipe(x)), x),
}


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("message", REFUSED)
def test_a_refused_backward_pass_does_no_harm(message):
    pipe, x = called(), samples(M, 3)
    with pytest.raises(RuntimeError, match=message):
        REFUSED[message](pipe, x)
    assert_same(train_step(pipe, x), train_step(chain(N), x))


class Aside(nn.Module):
    """Keeps a tensor made of its input for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.kept: list[torch.Tensor] = []

    def forward(self, x):
        self.kept.append((x * x).sum())
        return self.linear(x)


@both_workers
@pytest.mark.parametrize("first", ["output", "aside", "aside alone"])
@pytest.mark.parametrize("where", ["layers", "batch"])
def test_a_tensor_kept_aside_raises_rather_than_lose_gradients(where, first, workers):
    aside = Aside()
    layers = [Mix(), aside, Mix()] if where == "layers" else [aside, Mix()]
    options = {"chunks": M, "checkpoint": "never", "schedule": "gpipe", "workers": workers}
    pipe = on_cpu(nn.Sequential(*layers), [1] * len(layers), **options)
    output = pipe(torch.ones(M, 3).requires_grad_(where == "batch")).sum()
    kept = sum(aside.kept)
    loss = {"output": output + kept, "aside": kept + output, "aside alone": kept}[first]
    message = r"got some from a tensor that a layer keeps aside, .*use checkpoint='never' without a schedule"
    with pytest.raises(RuntimeError, match=message):
        loss.backward()


@both_workers
def test_a_tensor_that_another_layer_has_from_there_raises_too(workers):
    aside = Aside()

    class Takes(Mix):
        def forward(self, x):
            return super().forward(x) + aside.kept[-1]

    options = {"chunks": 1, "checkpoint": "never", "schedule": "gpipe", "workers": workers}
    output = on_cpu(nn.Sequential(Mix(), aside, Takes()), [1, 1, 1], **options)(torch.ones(M, 3))
    with pytest.raises(RuntimeError, match="must come from the pipeline's outputs"):
        output.sum().backward()


def test_what_is_kept_aside_of_parameters_alone_gets_its_gradients():
    class Decays(Mix):
        def forward(self, x):
            self.kept = self.linear.weight.square().sum()
            return super().forward(x)

    torch.manual_seed(3)
    plain = nn.Sequential(Decays(), Decays()).double()
    pipe = on_cpu(copy.deepcopy(plain), [1, 1], chunks=2, checkpoint="never", schedule="gpipe")
    for model in (plain, pipe):
        (score(model(samples(4, 3))) + sum(layer.kept for layer in model)).backward()
    torch.testing.assert_close(gradients(pipe), gradients(plain))
