"""The simulated engine issues tasks in the order in which the real one does, on the CPU, with one autograd thread.

A task without checkpoint makes many nodes. The real engine runs them one by one, the simulation runs them in one piece.
If one thread numbers all nodes, that is the same. If each partition's worker numbers its own, it is the same only if no
other node comes in between. So with workers partitions are equally deep here in mode ``never``, and no task has a
number as high as those of the nodes between tasks. Not covered is the order on the CPU, with workers, of partitions
that are unlike or have very many nodes, in modes ``never`` and ``except_last``. On accelerators every device has an
autograd thread of its own, see tests/emulator.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

from gpipe_bench import Components
from gpipe_bench.simulator.steps.run import Settings, run
from tests.engine.support import MODES, Watch, on_cpu, skip_pair
from tests.simulator.support import Plain, examples, order, task, workload


class Chain(nn.Module):
    """As many autograd nodes as it is deep."""

    def __init__(self, depth):
        super().__init__()
        self.weights = nn.ParameterList(torch.ones(1) for _ in range(depth))

    def forward(self, x):
        for weight in self.weights:
            x = x * weight
        return x


@st.composite
def cases(draw):
    """(m, depth of each partition, skips as (source, target))."""
    n = draw(st.integers(1, 6))
    depths = draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))
    pairs = st.integers(0, n - 2).flatmap(lambda source: st.tuples(st.just(source), st.integers(source + 1, n - 1)))
    skips = draw(st.lists(pairs, max_size=3)) if n > 1 else []
    return draw(st.integers(1, 6)), depths, sorted(skips, key=lambda skip: skip[0])


def real_order(m, depths, skips, *, tokens, **options):
    """Copies of the forward pass (its computations race), and everything of the backward pass."""
    members = [[Chain(depth)] for depth in depths]
    if tokens:
        members[0].insert(0, nn.Embedding(1, 1))
    for source, target in skips:
        stash, pop = skip_pair()
        members[source].append(stash)
        members[target].insert(0, pop)
    layers = nn.Sequential(*(layer for member in members for layer in member))
    pipe, watch = on_cpu(layers, [len(member) for member in members], chunks=m, **options), Watch()
    with pipe.observe(watch):
        output = pipe(torch.zeros(m, 3, dtype=torch.long) if tokens else torch.ones(m, 3))
        forward = watch.order("CP").split()
        count = len(watch.seen)
        output.sum().backward()
    watch.seen = watch.seen[count:]
    return forward, watch.order().split()


def simulated_order(m, nodes, skips, *, checkpoint, components, transfer, workers):
    work = workload(m, [task(nodes=count) for count in nodes], skips)
    places = {"devices": (0,) * work.n, "streams": False, "workers": workers == "always"}
    simulated = run(work, Plain(), Settings(components, checkpoint, transfer=transfer, **places))
    names = order(simulated)
    backward = next(index for index, name in enumerate(names) if name[0] in "RB")
    assert not set("".join(names[backward:])) & set("FCP")
    return [name for name in names[:backward] if name[0] in "CP"], names[backward:]


# Each by itself: examples that are drawn one after the other are much alike.
@pytest.mark.parametrize("tokens", [False, True], ids=["numbers", "tokens"])
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("workers", ["always", "never"])
@examples(30)
@given(case=cases(), components=st.sampled_from(list(Components.factorial())))
def test_tasks_are_issued_in_the_order_of_the_real_engine(case, components, workers, checkpoint, transfer, tokens):
    m, depths, skips = case
    # A stash makes one node, and so does a pop, and an observer's mark at either end of what needs a gradient.
    others = [sum(j in skip for skip in skips) + (tokens and not j) + 1 + (j > 0) for j in range(len(depths))]
    nodes = [depth + more for depth, more in zip(depths, others, strict=True)]
    if workers == "always" and components.clock_cycle and len(depths) > 1 and checkpoint != "always":
        if checkpoint == "never":
            nodes = [max(others) + 1] * len(nodes)
            depths = [count - more for count, more in zip(nodes, others, strict=True)]
        tasks = {"never": m * max(nodes), "except_last": m - 1 + max(nodes)}
        assume(tasks[checkpoint] <= m * len(depths))
    options = {"checkpoint": checkpoint, "transfer": transfer, "components": components, "workers": workers}
    assert real_order(m, depths, skips, tokens=tokens, **options) == simulated_order(m, nodes, skips, **options)
