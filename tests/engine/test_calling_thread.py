"""Tasks in the calling thread and tasks in workers: the same order, the same bits, the same modes afterwards."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from gpipe_bench import Components, is_checkpointing, is_recomputing
from gpipe_bench.engine.autograd import Made, Numbers
from gpipe_bench.skip import Namespace, pop, skippable, stash
from tests.engine.support import (
    FACTORIAL,
    MODES,
    SOME,
    Identity,
    Mix,
    Probe,
    crossing_model,
    label,
    numbered,
    on_cpu,
    probe_pipe,
    score,
)

M, N = 4, 3
BACKWARDS = ("autograd", "scheduled")


def backward_order(workers: str, m: int, n: int, **options) -> list[str]:
    log: list[str] = []
    pipe = probe_pipe(n, log, chunks=m, workers=workers, **options)
    pipe(numbered(m)).sum().backward()
    log.clear()
    pipe(numbered(m)).sum().backward()
    return [name for name in log if name[0] != "F"]


def by_partition(order: list[str]) -> list[str]:
    """What runs at the same time in the scheduled mode has no order of its own."""
    return sorted(order, key=lambda name: name.split(",")[1])


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
def test_recomputations_and_backward_passes_come_in_the_same_order(components, checkpoint, backward):
    same = by_partition if backward == "scheduled" else list
    for transfer in ("direct", "host"):
        for m, n, depth in ((1, 3, 0), (2, 2, 0), (4, 3, 0), (3, 3, 5)):
            options = {"checkpoint": checkpoint, "components": components, "transfer": transfer, "backward": backward}
            beside, alone = (backward_order(workers, m, n, depth=depth, **options) for workers in ("always", "never"))
            assert same(alone) == same(beside)


@pytest.mark.parametrize("fork_join", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_thread_that_has_made_no_node_yet_numbers_them_alike(checkpoint, fork_join):
    orders = []

    def work(workers):
        log: list[str] = []
        components = Components(fork_join=fork_join)
        pipe = probe_pipe(N, log, chunks=M, depth=7, workers=workers, checkpoint=checkpoint, components=components)
        pipe(numbered(M)).sum().backward()
        orders.append(log[M * N :])

    for workers in ("always", "never"):
        thread = threading.Thread(target=work, args=(workers,))
        thread.start()
        thread.join()
    assert orders[0] == orders[1]


class Nested(nn.Module):
    """A pipeline of its own in a layer, before the probe of a partition."""

    def __init__(self, j: int, log: list[str]) -> None:
        super().__init__()
        self.inner = on_cpu(nn.Sequential(Keep()), [1], chunks=1, checkpoint="never")
        self.probe = Probe(j, log)

    def forward(self, x):
        return self.probe(self.inner(x))


class Keep(nn.Module):
    def forward(self, x):
        return x * 1


def test_a_task_that_was_numbered_keeps_its_numbers_when_a_longer_one_follows():
    """In a new thread, whose own count has not come as far as the numbers that are given."""
    numbers = []

    def work():
        given, leaf = Numbers(100), torch.ones(1, requires_grad=True)
        given.skip(0)
        one = Made((), lambda: (leaf + 0,))
        given.renumber(0, one)
        (first,) = one.outputs
        given.renumber(1, Made((first,), lambda: (sum([torch.ones(1)] * 150, first),)))
        numbers.append(first.grad_fn._sequence_nr())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert numbers == [100]


@pytest.mark.parametrize("fork_join", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
def test_pipelines_in_layers_do_not_change_the_order(checkpoint, fork_join):
    orders = []
    for workers in ("always", "never"):
        log: list[str] = []
        layers = nn.Sequential(*(Nested(j, log) for j in range(N)))
        pipe = on_cpu(layers, [1] * N, chunks=M, workers=workers, checkpoint=checkpoint, transfer="host",
                      components=Components(fork_join=fork_join))  # fmt: skip
        pipe(numbered(M)).sum().backward()
        orders.append(log[M * N :])
    assert orders[0] == orders[1]


class Around(nn.Module):
    """A pipeline of its own between two layers; with two partitions its nodes are not this thread's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.inner = on_cpu(nn.Sequential(Mix(), Mix()), [1, 1], chunks=1, checkpoint="never")

    def forward(self, x):
        return self.inner(self.first(x).sin()).tanh()


def around(workers: str, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    pipe = on_cpu(nn.Sequential(Mix(), Around(), Mix()), [1] * N, chunks=M, workers=workers, **options)
    pipe(torch.linspace(-2, 2, 24).view(8, 3)).exp().mean().backward()
    return [parameter.grad for parameter in pipe.parameters()]


@pytest.mark.parametrize("fork_join", [True, False])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("checkpoint", MODES)
def test_nodes_behind_those_of_a_pipeline_in_a_layer_are_numbered_too(checkpoint, backward, fork_join):
    options = {"checkpoint": checkpoint, "backward": backward, "components": Components(fork_join=fork_join)}
    found, expected = around("never", **options), around("always", **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_nodes_behind_those_of_another_thread_get_the_numbers_that_a_worker_would_have_counted():
    """Down to the inputs of the task, whose makers are another's."""
    leaf = torch.ones(1, requires_grad=True)
    given = Numbers(4)
    entering = leaf * 2
    before = entering.grad_fn._sequence_nr()

    def job():
        others = []
        own = entering + 1
        thread = threading.Thread(target=lambda: others.append(own * 3))
        thread.start()
        thread.join()
        return (others[0] + 1,)

    made = Made((entering,), job)
    given.renumber(0, made)
    (output,) = made.outputs
    assert not made.alone
    nodes = [output.grad_fn]
    for _ in range(3):
        nodes.append(nodes[-1].next_functions[0][0])
    assert [node.name() for node in nodes] == ["AddBackward0", "MulBackward0", "AddBackward0", "MulBackward0"]
    assert [node._sequence_nr() for node in nodes] == [1, 0, 0, before]


class Tell(nn.Module):
    """Notes recomputation and backward pass; the number of the micro-batch is in column 0."""

    def __init__(self, log: list[str], name: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.log, self.name = log, name

    def forward(self, x):
        i = int(x[0, 0])
        if is_recomputing():
            self.log.append(f"R{i},{self.name}")
        x = torch.cat([x[:, :1], self.linear(x).tanh()], 1)
        return Identity.apply(x, lambda: self.log.append(f"B{i},{self.name}"))


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x):
        yield stash("skip", x.sin())
        return x


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x):
        skip = yield pop("skip")
        return torch.cat([x[:, :1], x[:, 1:] + skip[:, 1:]], 1)


def skipping(log: list[str], workers: str, **options):
    """Four partitions; one skip crosses three boundaries, one crosses one."""
    torch.manual_seed(3)
    outer, inner = Namespace(), Namespace()
    layers = [Tell(log, "0"), Stash().isolate(outer), Tell(log, "1"), Stash().isolate(inner), Tell(log, "2"),
              Pop().isolate(inner), Pop().isolate(outer), Tell(log, "3")]  # fmt: skip
    return on_cpu(nn.Sequential(*layers), [2, 2, 2, 2], chunks=M, workers=workers, **options)


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", FACTORIAL, ids=label)
def test_skips_do_not_change_the_order_either(components, checkpoint, backward):
    orders, gradients = [], []
    for workers in ("always", "never"):
        log: list[str] = []
        pipe = skipping(log, workers, checkpoint=checkpoint, components=components, backward=backward)
        pipe(numbered(M, 2) * torch.ones(3)).sum().backward()
        orders.append(by_partition(log) if backward == "scheduled" else log)
        gradients.append([parameter.grad for parameter in pipe.parameters()])
    assert orders[0] == orders[1]
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def outcome(workers: str, steps: int = 3, **options):
    """Losses, gradients, running statistics and the generator's state after some steps, with dropout."""
    torch.manual_seed(5)
    layers = [*crossing_model(), nn.Dropout(0.4), nn.BatchNorm1d(3), Mix()]
    pipe = on_cpu(nn.Sequential(*layers).double(), [2, 2, 3, 3], chunks=M, deferred_batch_norm=True, workers=workers,
                  **options)  # fmt: skip
    losses = []
    for _ in range(steps):
        loss = score(pipe(torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3)))
        loss.backward()
        losses.append(loss.detach())
    return [*losses, *(p.grad for p in pipe.parameters()), *pipe.buffers(), torch.get_rng_state()]


@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("components", SOME, ids=label)
def test_results_are_the_same_to_the_bit(components, checkpoint, backward):
    options = {"checkpoint": checkpoint, "components": components, "backward": backward}
    found, expected = outcome("never", **options), outcome("always", **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


class Moody(nn.Module):
    """Leaves the thread in other modes than it found, and maybe raises."""

    def __init__(self, *, fails: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.fails = fails

    def forward(self, x):
        if self.fails:
            raise BoomError
        return x * self.weight


class BoomError(Exception):
    pass


def modes() -> tuple[object, ...]:
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_autocast_cache_enabled(),
        torch.get_num_threads(),
        is_checkpointing(),
        is_recomputing(),
        torch._C._len_torch_dispatch_stack(),
    )


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize(
    "context",
    [nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", dtype=torch.bfloat16)],
    ids=["plain", "no_grad", "inference", "autocast"],
)
def test_the_calling_thread_is_left_as_it_was(context, checkpoint, backward, fails):
    pipe = on_cpu(nn.Sequential(Moody(), nn.Dropout(), Moody(fails=fails)), [1, 1, 1], chunks=M, checkpoint=checkpoint,
                  backward=backward, workers="never")  # fmt: skip
    with context():
        before = modes()
        with pytest.raises(BoomError) if fails else nullcontext():
            output = pipe(torch.ones(M, 1))
            if output.requires_grad:
                output.sum().backward()
        assert modes() == before


class LeavesOff(nn.Module):
    """Switches grad mode off behind its back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x):
        y = self.linear(x)
        torch.set_grad_enabled(False)
        return y


@pytest.fixture
def grad_mode():
    """Whatever a test leaves behind."""
    yield
    torch.set_grad_enabled(True)


@pytest.mark.usefixtures("grad_mode")
@pytest.mark.parametrize("backward", BACKWARDS)
@pytest.mark.parametrize("checkpoint", MODES)
def test_a_layer_that_leaves_grad_mode_off_does_so_for_its_own_task_only(checkpoint, backward):
    gradients = []
    for workers in ("always", "never"):
        torch.manual_seed(0)
        layers = nn.Sequential(LeavesOff(), Mix(), Mix())
        pipe = on_cpu(layers, [1, 1, 1], chunks=M, checkpoint=checkpoint, backward=backward, workers=workers)
        for _ in range(2):
            output = pipe(torch.ones(M, 3).requires_grad_())
            assert torch.is_grad_enabled()
            output.sum().backward()
        gradients.append([parameter.grad for parameter in pipe.parameters()])
    assert all(grad is not None for grad in gradients[0])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
