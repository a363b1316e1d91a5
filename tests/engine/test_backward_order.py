"""The order of recomputations and backward passes, as the layers themselves note it.

R3,2 is the recomputation of micro-batch 3 on partition 2, B3,2 its backward pass. Every accelerator has an autograd
thread of its own, and runs its column of a picture. On the CPU one autograd thread runs all columns: among tasks that
are ready it takes the one with the highest number in its own worker, here that of the micro-batch.
"""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from gpipe_bench import Components
from tests.engine.support import MODES, Affine, InPlace, Watch, numbered, on_cpu, probe_pipe, skip_pair

EXAMPLES = settings(max_examples=40)

WITH_FORK_JOIN = """
    R3,2 B3,2
    R2,2 R3,1 B3,1 R3,0 B3,0 B2,2
    R1,2 R2,1 B2,1 R2,0 B2,0 B1,2
    R0,2 R1,1 B1,1 R1,0 B1,0 B0,2
         R0,1 B0,1 R0,0 B0,0
"""
WITHOUT_FORK_JOIN = """
    R3,2 R2,2 R1,2 R0,2
    B3,2 R3,1 B3,1 R3,0 B3,0
    B2,2 R2,1 B2,1 R2,0 B2,0
    B1,2 R1,1 B1,1 R1,0 B1,0
    B0,2 R0,1 B0,1 R0,0 B0,0
"""
ONE_BY_ONE = """
    R3,2 B3,2 R3,1 B3,1 R3,0 B3,0
    R2,2 B2,2 R2,1 B2,1 R2,0 B2,0
    R1,2 B1,2 R1,1 B1,1 R1,0 B1,0
    R0,2 B0,2 R0,1 B0,1 R0,0 B0,0
"""
NEVER_ONE_BY_ONE = """
    B3,2 B3,1 B3,0
    B2,2 B2,1 B2,0
    B1,2 B1,1 B1,0
    B0,2 B0,1 B0,0
"""
# As published, computed with one worker for all partitions.
PUBLISHED_WITH = "R3,2 B3,2 R2,2 R3,1 B2,2 R1,2 B3,1 R2,1"
PUBLISHED_WITHOUT = "R3,2 R2,2 R1,2 R0,2 B3,2 R3,1 B2,2"


def in_a_working_thread(function, nodes=3000):
    """The result of ``function`` in a thread that has made thousands of autograd nodes before."""
    results = []

    def work():
        tensor = torch.ones(1, requires_grad=True)
        for _ in range(nodes):
            tensor = tensor + 0
        results.append(function())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return results[0]


def backward_orders(
    steps=1, m=4, n=3, transfer="direct", checkpoint="always", *, depth=0, nodes=3000, **switches
) -> list[str]:
    """The order of each step's backward pass."""

    def work():
        log = []
        options = {"chunks": m, "checkpoint": checkpoint, "transfer": transfer}
        pipe = probe_pipe(n, log, depth=depth, components=Components(**switches), **options)
        orders = []
        for _ in range(steps):
            output = pipe(numbered(m))
            log.clear()
            output.sum().backward()
            orders.append(" ".join(log))
        return orders

    return in_a_working_thread(work, nodes)


def flat(picture: str) -> str:
    return " ".join(picture.split())


def column(order: str, j: int) -> list[str]:
    """What one partition does."""
    return [name for name in order.split() if name.endswith(f",{j}")]


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize(
    ("switches", "picture"),
    [
        ({}, WITH_FORK_JOIN),
        ({"copy_streams": False, "portals": False}, WITH_FORK_JOIN),
        ({"fork_join": False}, WITHOUT_FORK_JOIN),
        ({"early_recompute": False}, ONE_BY_ONE),
        ({"early_recompute": False, "fork_join": False}, ONE_BY_ONE),
        ({"clock_cycle": False}, ONE_BY_ONE),
        ({"clock_cycle": False, "fork_join": False}, ONE_BY_ONE),
    ],
    ids=lambda value: "-".join(value) or "all on" if isinstance(value, dict) else "",
)
def test_exact_order_with_everything_checkpointed(switches, picture, transfer):
    assert backward_orders(2, transfer=transfer, **switches) == [flat(picture)] * 2


def test_exact_order_with_nothing_checkpointed_and_no_clock_cycle():
    assert backward_orders(checkpoint="never", clock_cycle=False) == [flat(NEVER_ONE_BY_ONE)]


@pytest.mark.parametrize(
    ("picture", "published"), [(WITH_FORK_JOIN, PUBLISHED_WITH), (WITHOUT_FORK_JOIN, PUBLISHED_WITHOUT)]
)
def test_every_partition_begins_as_published(picture, published):
    for j in range(3):
        begins = column(published, j)
        assert column(flat(picture), j)[: len(begins)] == begins


@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_early_recomputation_follows_the_backward_pass_before_it_and_not_the_gradient(checkpoint, transfer):
    """R(i-1,2) comes before B(i,1): it overlaps the way of the gradients through the other partitions."""
    names = backward_orders(checkpoint=checkpoint, transfer=transfer)[0].split()
    for i in (3, 2, 1):
        assert names.index(f"B{i},2") < names.index(f"R{i - 1},2") < names.index(f"B{i},1")


class Noted(Affine):
    """Notes its partition in the backward pass, without an observer: marks would stand before what is written to."""

    def __init__(self, log, j):
        super().__init__()
        self.log, self.j = log, j

    def forward(self, x):
        x = super().forward(x)
        if x.requires_grad:
            x.register_hook(lambda _: self.log.append(self.j))
        return x


@pytest.mark.parametrize("checkpoint", MODES)
def test_a_layer_that_writes_to_the_input_of_its_partition_changes_no_order(checkpoint):
    orders = []
    for first in (nn.Identity(), InPlace()):
        log = []
        layers = nn.Sequential(Noted(log, 0), first, Noted(log, 1), Noted(log, 2))
        pipe = on_cpu(layers, [1, 2, 1], chunks=4, checkpoint=checkpoint)
        for _ in range(2):
            pipe(torch.ones(4, 3)).sum().backward()
        orders.append(log)
    assert len(orders[0]) == 24
    assert orders[0][:12] == orders[0][12:]
    assert orders[0] == orders[1]


@pytest.mark.parametrize("fork_join", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
def test_order_is_that_of_the_first_step_in_the_fiftieth(checkpoint, fork_join):
    orders = backward_orders(50, checkpoint=checkpoint, fork_join=fork_join, depth=3)
    assert set(orders) == {orders[0]}


@pytest.mark.parametrize("clock_cycle", [True, False])
@pytest.mark.parametrize("fork_join", [True, False])
@pytest.mark.parametrize("checkpoint", MODES)
def test_order_does_not_depend_on_what_the_calling_thread_did_before(checkpoint, fork_join, clock_cycle):
    fresh, busy = (
        backward_orders(checkpoint=checkpoint, fork_join=fork_join, clock_cycle=clock_cycle, nodes=nodes)
        for nodes in (0, 5000)
    )
    assert fresh == busy


# Without checkpoints the nodes of layers are in the queue themselves, and their numbers depend on their number.
@pytest.mark.parametrize("fork_join", [True, False])
def test_order_of_checkpoints_does_not_depend_on_the_depth_of_layers(fork_join):
    shallow, deep = (backward_orders(fork_join=fork_join, depth=depth)[0] for depth in (0, 40))
    # the end of every backward pass follows its beginning
    assert deep.split() == [
        part for name in shallow.split() for part in ([name] if name[0] == "R" else [name, name.lower()])
    ]


@pytest.mark.parametrize("checkpoint", ["except_last", "never"])
def test_fork_join_ends_a_backward_pass_before_the_next_of_its_partition_begins(checkpoint):
    """However deep the layers are."""
    (order,) = backward_orders(checkpoint=checkpoint, depth=40)
    for j in (1, 2):
        assert [name for name in column(order, j) if name[0] != "R"] == [
            f"{letter}{i},{j}" for i in (3, 2, 1, 0) for letter in "Bb"
        ]


@EXAMPLES
@given(
    m=st.integers(1, 5),
    n=st.integers(1, 4),
    checkpoint=st.sampled_from(MODES),
    transfer=st.sampled_from(["direct", "host"]),
    switches=st.fixed_dictionaries({name: st.booleans() for name in ("clock_cycle", "early_recompute")}),
)
def test_fork_join_runs_every_partition_from_the_last_microbatch_to_the_first(m, n, checkpoint, transfer, switches):
    for order in backward_orders(3, m, n, transfer, checkpoint, **switches):
        for j in range(n):
            assert [name for name in column(order, j) if name[0] == "B"] == [f"B{i},{j}" for i in reversed(range(m))]


@EXAMPLES
@given(
    m=st.integers(2, 5),
    n=st.integers(1, 4),
    transfer=st.sampled_from(["direct", "host"]),
    checkpoint=st.sampled_from(["always", "except_last"]),
    clock_cycle=st.booleans(),
)
def test_fork_join_keeps_one_recomputation_of_a_partition_at_a_time(m, n, transfer, checkpoint, clock_cycle):
    for order in backward_orders(3, m, n, transfer, checkpoint, clock_cycle=clock_cycle):
        for j in range(n):
            expected = [f"{letter}{i},{j}" for i in reversed(range(m)) for letter in "RB"]
            assert column(order, j) == (expected if checkpoint == "always" else expected[1:])


@EXAMPLES
@given(m=st.integers(2, 5), n=st.integers(2, 4), checkpoint=st.sampled_from(["always", "except_last"]))
def test_without_fork_join_the_last_partition_recomputes_everything_first(m, n, checkpoint):
    recomputed = m if checkpoint == "always" else m - 1
    for order in backward_orders(3, m, n, checkpoint=checkpoint, fork_join=False):
        last = [name[0] for name in column(order, n - 1)]
        assert last == ["R"] * recomputed + ["B"] * m


@EXAMPLES
@given(
    m=st.integers(1, 5),
    n=st.integers(1, 4),
    checkpoint=st.sampled_from(["always", "except_last"]),
    fork_join=st.booleans(),
    clock_cycle=st.booleans(),
)
def test_late_recomputation_comes_directly_before_its_backward_pass(m, n, checkpoint, fork_join, clock_cycle):
    switches = {"early_recompute": False, "fork_join": fork_join, "clock_cycle": clock_cycle}
    for order in backward_orders(2, m, n, checkpoint=checkpoint, **switches):
        names = order.split()
        for here, after in itertools.pairwise(names):
            assert here[0] == "B" or after == "B" + here[1:]


@EXAMPLES
@given(
    m=st.integers(2, 4),
    checkpoint=st.sampled_from(MODES),
    transfer=st.sampled_from(["direct", "host"]),
    portals=st.booleans(),
    clock_cycle=st.booleans(),
    trained=st.booleans(),
)
def test_skips_do_not_disturb_the_order(m, checkpoint, transfer, portals, clock_cycle, trained):
    def work():
        (outer, outer_end), (inner, inner_end) = skip_pair(), skip_pair()
        layers = [
            nn.Linear(3, 3),
            outer,
            nn.Linear(3, 3),
            inner,
            nn.Linear(3, 3),
            inner_end,
            outer_end,
            nn.Linear(3, 3),
        ]
        components = Components(portals=portals, clock_cycle=clock_cycle)
        pipe = on_cpu(
            nn.Sequential(*layers), [2, 2, 2, 2],
            chunks=m, checkpoint=checkpoint, components=components, transfer=transfer,
        )  # fmt: skip
        with pipe.observe(watch := Watch()):
            pipe(torch.ones(m, 3, requires_grad=trained)).sum().backward()
        return watch.order("B").split()

    order = in_a_working_thread(work)
    for j in range(4):
        assert [name for name in order if name.endswith(f",{j}")] == [f"B{i},{j}" for i in reversed(range(m))]


@pytest.mark.parametrize("clock_cycle", [True, False])
@pytest.mark.parametrize("transfer", ["direct", "host"])
@pytest.mark.parametrize("checkpoint", ["always", "except_last"])
def test_a_frozen_first_partition_does_not_disturb_the_order(checkpoint, transfer, clock_cycle):
    """What enters partition 1 needs no gradient; a Join must stand there all the same."""
    log: list[str] = []

    def work():
        pipe = probe_pipe(
            3, log, chunks=4, checkpoint=checkpoint, transfer=transfer, components=Components(clock_cycle=clock_cycle)
        )
        pipe[0].requires_grad_(requires_grad=False)
        output = pipe(numbered(4))
        log.clear()
        output.sum().backward()

    in_a_working_thread(work)
    for j in (1, 2):
        expected = [f"{letter}{i},{j}" for i in (3, 2, 1, 0) for letter in "RB"]
        here = [name for name in log if name.endswith(f",{j}")]
        assert here == (expected if checkpoint == "always" else expected[1:])
