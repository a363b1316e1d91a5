"""The simulated engine issues tasks in the order in which the real one does, on the CPU, with one autograd thread."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_bench import Components
from gpipe_bench.simulator.runs.events import Settings, run
from tests.engine.support import MODES, Watch, on_cpu, skip_pair
from tests.simulator.support import Plain, order, task, workload

EXAMPLES = settings(deadline=None, derandomize=True, max_examples=60)


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
    n = draw(st.integers(1, 5))
    depths = draw(st.lists(st.integers(1, 4), min_size=n, max_size=n))
    pairs = st.integers(0, n - 2).flatmap(lambda source: st.tuples(st.just(source), st.integers(source + 1, n - 1)))
    skips = draw(st.lists(pairs, max_size=3)) if n > 1 else []
    return draw(st.integers(1, 6)), depths, sorted(skips, key=lambda skip: skip[0])


def real_order(m, depths, skips, *, tokens, **options):
    """For each of two batches (copies of the forward pass, everything of the backward pass).

    Computations of a forward pass race. The second batch spares what the first has shown to be needless.
    """
    members = [[Chain(depth)] for depth in depths]
    if tokens:
        members[0].insert(0, nn.Embedding(1, 1))
    for source, target in skips:
        stash, pop = skip_pair()
        members[source].append(stash)
        members[target].insert(0, pop)
    layers = nn.Sequential(*(layer for member in members for layer in member))
    pipe = on_cpu(layers, [len(member) for member in members], chunks=m, **options)
    orders = []
    for _ in range(2):
        watch = Watch()
        with pipe.observe(watch):
            # So that there is a mark at the inputs of every task, but where they are whole numbers.
            output = pipe(torch.zeros(m, 3, dtype=torch.long) if tokens else torch.ones(m, 3, requires_grad=True))
            forward = watch.order("CP").split()
            count = len(watch.seen)
            output.sum().backward()
        watch.seen = watch.seen[count:]
        orders.append((forward, watch.order().split()))
    return orders


def simulated_order(m, depths, skips, *, tokens, checkpoint, components, transfer):
    # A stash makes one node, and so does a pop.
    nodes = [depth + sum(j in skip for skip in skips) + (tokens and not j) for j, depth in enumerate(depths)]
    work = workload(m, [task(nodes=count) for count in nodes], skips)
    places = {"devices": (0,) * work.n, "streams": False, "marks": True}
    simulated = run(work, Plain(), Settings(components, checkpoint, transfer=transfer, **places))
    names = order(simulated)
    backward = next(index for index, name in enumerate(names) if name[0] in "RB")
    assert not set("".join(names[backward:])) & set("FCP")
    return [name for name in names[:backward] if name[0] in "CP"], names[backward:]


# Each by itself: examples that are drawn one after the other are much alike.
@pytest.mark.parametrize("tokens", [False, True], ids=["numbers", "tokens"])
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", MODES)
@EXAMPLES
@given(case=cases(), components=st.sampled_from(list(Components.factorial())))
def test_tasks_are_issued_in_the_order_of_the_real_engine(case, components, checkpoint, transfer, tokens):
    m, depths, skips = case
    options = {"checkpoint": checkpoint, "transfer": transfer, "components": components, "tokens": tokens}
    assert real_order(m, depths, skips, **options) == [simulated_order(m, depths, skips, **options)] * 2
