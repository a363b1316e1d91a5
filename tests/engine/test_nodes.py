"""Which nodes the paper's executor puts into the autograd graph: exactly so many, for every combination of components.

    input ─ (Join ─ Copy ─ Wait ─ Checkpoint ─ Wait ─ Recompute ─ Fork) per task ─ Guard ─ output
                         └──────── Portal, past the partitions between ────────┘

Wait nodes exist where there are copy streams, and so none on the CPU. Copy and Portal exist between devices, and on one
device where tensors go through the host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from gpipe_bench import Components, GPipe
from tests.cover import cover
from tests.engine.support import FACTORIAL, MODES, Mix, label, on_cpu

M = 3
OWN = ("Fork", "Join", "Copy", "Wait", "Portal", "Checkpoint", "Recompute", "Guard")
# What each component switches on the CPU.
SWITCHED = {
    "clock_cycle": set(),
    "fork_join": {"Fork", "Join"},
    "copy_streams": set(),
    "portals": {"Portal"},
    "early_recompute": {"Recompute"},
}


def chain() -> nn.Sequential:
    return nn.Sequential(*(Mix() for _ in range(4)))


def small_unet() -> nn.Sequential:
    """29 layers: the outer skip goes from layer 4 to 23, the inner one from 10 to 17."""
    from gpipe_bench.models.unet import unet

    return unet(depth=2, blocks=1, channels=2, dropout=0.0)


# (model, balance, partitions that each skip between partitions leaves and reaches, shape of a sample)
CASES = {
    "chain 2 2": (chain, [2, 2], [], (3,)),
    "chain 1 2 1": (chain, [1, 2, 1], [], (3,)),
    "unet 5 8 4 12": (small_unet, [5, 8, 4, 12], [(0, 3), (1, 3)], (3, 8, 8)),
    "unet 6 12 11": (small_unet, [6, 12, 11], [(0, 2)], (3, 8, 8)),
}
every_case = pytest.mark.parametrize("case", CASES)
WAYS = list(product(["direct", "host"], [True, False]))
"""How tensors travel, and whether the batch requires a gradient."""


def piped(case: str, components: Components, checkpoint: str, transfer: str) -> GPipe:
    make, balance, _, _ = CASES[case]
    return on_cpu(make(), balance, chunks=M, components=components, checkpoint=checkpoint, transfer=transfer)


def batch(case: str, *, trained: bool) -> Tensor:
    return torch.ones(2 * M - 1, *CASES[case][3], requires_grad=trained)


def graph(output: Tensor) -> list[Node]:
    """All nodes behind ``output``."""
    seen: dict[Node, None] = {}
    todo = [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen[node] = None
            todo += [behind for behind, _ in node.next_functions]
    return list(seen)


def names(nodes: list[Node]) -> Counter[str]:
    return Counter(type(node).__name__.removesuffix("Backward") for node in nodes)


def expected(case: str, components: Components, checkpoint: str, transfer: str, *, trained: bool) -> dict[str, int]:
    """The numbers of nodes.

    Args:
        trained: whether the batch requires a gradient.
    """
    _, balance, skips, _ = CASES[case]
    n = len(balance)
    checkpointed = {"always": M, "except_last": M - 1, "never": 0}[checkpoint]
    moved = transfer == "host"
    # The last micro-batch of except_last is one node on each partition, which keeps its activations. Without any
    # checkpoint and without a gradient of the batch, nothing on the first partition can be tied.
    kept = n if checkpoint == "except_last" else 0
    untied = M - 1 if checkpoint == "never" and not trained else 0
    return {
        "Fork": (M - 1) * n * components.fork_join,
        "Join": ((M - 1) * n - untied) * components.fork_join,
        "Copy": M * (n - 1) * moved,
        "Wait": 0,
        "Portal": M * len(skips) * moved * components.portals,
        "Checkpoint": checkpointed * n + kept,
        "Recompute": checkpointed * n * components.early_recompute,
        "Guard": int(checkpointed > 0),
    }


@pytest.mark.parametrize(
    ("case", "checkpoint", "components"),
    cover(product(CASES, MODES, FACTORIAL), lambda one: (*one[:2], *astuple(one[2])), together=4),
    ids=label,
)
def test_how_many_nodes_there_are(case, checkpoint, components):
    for transfer, trained in WAYS:
        found = names(graph(piped(case, components, checkpoint, transfer)(batch(case, trained=trained))))
        exact = expected(case, components, checkpoint, transfer, trained=trained)
        assert {name: found[name] for name in OWN} == exact, (transfer, trained)


@every_case
@pytest.mark.parametrize("checkpoint", MODES)
@pytest.mark.parametrize("component", Components.switched())
def test_a_component_switches_its_own_nodes_and_no_other(component, checkpoint, case):
    """Not those of the layers either."""
    some = [each for each in FACTORIAL if getattr(each, component)][::4]
    for on, (transfer, trained) in zip(some, WAYS, strict=True):
        pair = [piped(case, each, checkpoint, transfer) for each in (on, replace(on, **{component: False}))]
        one, other = (names(graph(pipe(batch(case, trained=trained)))) for pipe in pair)
        assert {name for name in one.keys() | other.keys() if one[name] != other[name]} <= SWITCHED[component], on


@every_case
@pytest.mark.parametrize("portals", [True, False])
def test_without_portals_copies_are_larger_and_not_more(case, portals):
    _, balance, skips, _ = CASES[case]
    pipe = piped(case, Components(portals=portals), "never", "host")
    nodes = graph(pipe(batch(case, trained=True)))
    # a Copy has an edge for each of its tensors
    carried = [len(node.next_functions) for node in nodes if type(node).__name__ == "CopyBackward"]
    riding = 0 if portals else sum(target - source for source, target in skips)
    assert sum(carried) == M * (len(balance) - 1 + riding)


@pytest.mark.parametrize("component", ["fork_join", "portals", "early_recompute"])
def test_each_component_is_seen_to_switch_something(component):
    """Otherwise the test above would say nothing."""
    case = "unet 5 8 4 12"
    counts = [
        names(graph(piped(case, Components(**{component: on}), "always", "host")(batch(case, trained=True))))
        for on in (True, False)
    ]
    assert all(counts[0][name] > counts[1][name] == 0 for name in SWITCHED[component])


@pytest.mark.parametrize("components", FACTORIAL, ids=label)
def test_one_microbatch_on_one_partition_has_a_checkpoint_and_nothing_to_order(components):
    pipe = on_cpu(chain(), [4], chunks=1, components=components, checkpoint="always")
    found = names(graph(pipe(torch.ones(2, 3))))
    early = {"Recompute": 1} if components.early_recompute else {}
    assert {name: found[name] for name in OWN if found[name]} == {"Checkpoint": 1, "Guard": 1, **early}
