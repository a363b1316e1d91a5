"""Fork and Join are left out where the numbers of the nodes give the order, and nowhere else."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import torch
from torch import nn

from gpipe_bench import Components
from gpipe_bench.schedule import clock_cycles
from tests.engine.support import Identity, Mix, numbered, on_cpu, probe_pipe

M, N = 4, 3
WORKERS = ("always", "never")


def lanes(output: torch.Tensor) -> Counter[str]:
    """How many nodes of each kind of lane are behind a tensor."""
    todo, seen, found = [output.grad_fn], set(), Counter()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        found[node.name().removesuffix("Backward")] += 1
        todo += [parent for parent, _ in node.next_functions]
    return Counter({name: count for name, count in found.items() if name in ("Fork", "Join", "Recompute")})


def chain(*layers: nn.Module, batches: int = 1, **options) -> torch.Tensor:
    """The output of the last of some batches."""
    torch.manual_seed(0)
    options = {"chunks": M, "checkpoint": "never", **options}
    pipe = on_cpu(nn.Sequential(*layers), [1] * len(layers), **options)
    for _ in range(batches):
        output = pipe(torch.linspace(-1, 1, 24).view(8, 3).requires_grad_())
    return output


class Both(nn.Module):
    """One tensor in, two out; two in, one out."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, x):
        return (self.mix(x), x.sin()) if isinstance(x, torch.Tensor) else self.mix(x[0]) + x[1]


class Aside(nn.Module):
    """Keeps a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.kept = Mix(), []

    def forward(self, x):
        self.kept.append(self.mix(x).square().mean())
        return self.mix(x)


class Elsewhere(nn.Module):
    """Computes in a thread of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, x):
        results = []
        thread = threading.Thread(target=lambda: results.append(self.mix(x)))
        thread.start()
        thread.join()
        return results[0] * 2


@pytest.mark.parametrize("workers", WORKERS)
def test_a_chain_of_plain_layers_has_no_lanes(workers):
    assert lanes(chain(Mix(), Mix(), Mix(), workers=workers)) == {}


def test_nor_has_one_partition_alone():
    assert lanes(chain(Mix())) == {}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(
    ("layer", "laned"),
    [(Both, 1), (Aside, 1), (Elsewhere, 1), (lambda: on_cpu(nn.Sequential(Mix()), [1], chunks=1), 3)],
)
def test_partitions_whose_numbers_would_not_do_have_lanes(layer, laned, workers):
    """All of them where a pipeline is in a layer, whose nodes have numbers of their own."""
    layers = (layer(), Both() if layer is Both else Mix(), Mix())
    assert lanes(chain(*layers, workers=workers)) == {"Fork": laned * (M - 1), "Join": laned * (M - 1)}


@pytest.mark.parametrize("workers", WORKERS)
def test_a_partition_that_is_no_longer_alone_has_lanes_from_there_on(workers):
    class Later(Aside):
        def forward(self, x):
            return super().forward(x) if x.detach()[0, 0] > 0 else self.mix(x)

    assert lanes(chain(Later(), Mix(), workers=workers)) == {"Fork": 1, "Join": 1}


@pytest.mark.parametrize("workers", WORKERS)
def test_copies_keep_the_lanes(workers):
    copied = lanes(chain(Mix(), Mix(), transfer="host", workers=workers))
    assert copied == {"Fork": 2 * (M - 1), "Join": M - 1}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("early", [True, False])
def test_checkpoints_need_neither_lanes_nor_nodes_that_recompute(early, workers):
    components = Components(early_recompute=early)
    assert lanes(chain(Mix(), Mix(), checkpoint="always", components=components, workers=workers)) == {}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("early", "fork"), [(True, "Recompute"), (False, "Fork")])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_last_checkpoint_before_a_task_without_has_them_until_a_batch_has_shown_that_none_is_needed(
    early, fork, count, workers
):
    options = {"checkpoint": "except_last", "components": Components(early_recompute=early), "workers": workers}
    layers = [Mix() for _ in range(count)]
    assert lanes(chain(*layers, **options)) == {fork: count, "Join": count}
    assert lanes(chain(*layers, batches=2, **options)) == {}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize(("layer", "laned"), [(Both, 1), (Aside, 1), (Elsewhere, 1), (nn.Identity, 1)])
def test_before_a_task_whose_numbers_would_not_do_the_last_checkpoint_has_them_in_every_batch(layer, laned, workers):
    layers = (Mix(), layer(), Both() if layer is Both else Mix())
    found = lanes(chain(*layers, batches=3, checkpoint="except_last", workers=workers))
    assert found == {"Recompute": laned, "Join": laned}


@pytest.mark.parametrize("options", [{"transfer": "host"}, {"components": Components(clock_cycle=False)}])
def test_checkpoints_have_them_where_numbers_would_not_do(options):
    assert lanes(chain(Mix(), Mix(), checkpoint="always", **options)) == {"Recompute": 2 * M}


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("depths", [(0, 0, 0), (9, 1, 4), (1, 30, 2)])
def test_tasks_come_in_the_reversed_order_of_issue_whatever_the_depth_of_partitions(depths, workers):
    log: list[str] = []

    class Deep(nn.Module):
        def __init__(self, j: int, depth: int) -> None:
            super().__init__()
            self.j, self.depth, self.weight = j, depth, nn.Parameter(torch.ones(1))

        def forward(self, x):
            i = int(x.detach().flatten()[0])
            for _ in range(self.depth):
                x = x + 0
            return Identity.apply(x * self.weight, lambda: log.append(f"{i},{self.j}"))

    layers = nn.Sequential(*(Deep(j, depth) for j, depth in enumerate(depths)))
    pipe = on_cpu(layers, [1] * N, chunks=M, checkpoint="never", workers=workers)
    pipe(numbered(M)).sum().backward()
    assert log == [f"{i},{j}" for cycle in reversed(list(clock_cycles(M, N))) for i, j in reversed(cycle)]


def test_who_runs_the_tasks_shows_in_no_bit_beside_the_callers_own_graph():
    """A penalty made before the batch, and one made after it, add to the same gradients."""
    found = []
    for workers in WORKERS:
        torch.manual_seed(0)
        pipe = on_cpu(nn.Sequential(Mix(), Mix(), Mix()), [1] * N, chunks=M, checkpoint="never", workers=workers)
        x = torch.linspace(-1, 1, 24).view(8, 3)
        before = sum(p.square().sum() / 3 for p in pipe.parameters())
        output = pipe(x).exp().mean()
        after = sum(p.abs().sum() / 7 for p in pipe.parameters())
        (before + output + after).backward()
        found.append([p.grad for p in pipe.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_observation_does_not_bring_the_lanes_back():
    log: list[str] = []
    pipe = probe_pipe(N, log, chunks=M, checkpoint="never")

    class Deaf:
        def start(self, task):
            return task

        def finish(self, token, size):
            pass

    with pipe.observe(Deaf()):
        assert lanes(pipe(numbered(M))) == {}
