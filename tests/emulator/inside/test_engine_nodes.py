"""Which nodes stand between the tasks of a batch: Wait where there are copy streams, all others as on the CPU."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch

from gpipe_bench import Components, GPipe
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from tests.cover import cover
from tests.emulator.inside.pipelines import Case, batch, even_balance, model

M, N = 4, 3
OURS = ("Checkpoint", "Recompute", "Fork", "Join", "Copy", "Portal", "Wait", "Guard")
FACTORIAL = list(Components.factorial())


def nodes_of(output):
    """How many nodes of each kind the engine has made for an output."""
    seen, todo = set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            todo += [behind for behind, _ in node.next_functions]
    names = Counter(type(node).__name__.removesuffix("Backward") for node in seen)
    return {name: names[name] for name in OURS if names[name]}


def on_virtual_devices(components, checkpoint, *, devices=(0, 1, 2), needs_grad=True, skips="nested", **options):
    pipe = Case(devices, M, components, checkpoint, skips, **{"transfer": "direct"} | options).pipe()
    return nodes_of(pipe(batch(2 * M, pipe.devices[0]).requires_grad_(needs_grad)))


def on_the_cpu(components, checkpoint, *, needs_grad=True, skips="nested", transfer="direct"):
    options = {"chunks": M, "checkpoint": checkpoint, "components": components, "transfer": transfer}
    pipe = GPipe(model(skips), even_balance(N), devices=["cpu"] * N, **options)
    return nodes_of(pipe(batch(2 * M).requires_grad_(needs_grad)))


@pytest.mark.parametrize(
    ("components", "checkpoint", "needs_grad"), cover(product(FACTORIAL, CHECKPOINT_MODES, [True, False]))
)
def test_two_waits_for_each_boundary_and_microbatch_with_copy_streams_and_else_the_nodes_of_the_cpu(
    components, checkpoint, needs_grad
):
    # Between partitions on one device, as all are on the CPU, only the transfer through the host copies.
    found = on_virtual_devices(components, checkpoint, needs_grad=needs_grad, transfer="host")
    expected = on_the_cpu(components, checkpoint, needs_grad=needs_grad, transfer="host")
    waits = found.pop("Wait", 0)
    assert found == expected
    assert waits == (2 * (N - 1) * M if components.copy_streams else 0) or not needs_grad


@pytest.mark.parametrize("checkpoint", CHECKPOINT_MODES)
def test_the_nodes_of_a_batch(checkpoint):
    recomputed = {"always": M, "except_last": M - 1, "never": 0}[checkpoint]
    expected = {
        # The last micro-batch of except_last is one node, too, which keeps its activations.
        "Checkpoint": (M if checkpoint == "except_last" else recomputed) * N,
        "Recompute": recomputed * N,
        "Fork": (M - 1) * N,
        "Join": (M - 1) * N,
        "Copy": (N - 1) * M,
        "Portal": 2 * M,
        "Wait": 2 * (N - 1) * M,
        "Guard": 1,
    }
    if checkpoint == "never":
        expected = {name: count for name, count in expected.items() if count and name != "Guard"}
    assert on_virtual_devices(Components(), checkpoint) == expected


def test_partitions_of_one_device_wait_but_copy_nothing():
    found = on_virtual_devices(Components(), "always", devices=(1, 1, 1))
    assert found["Wait"] == 2 * (N - 1) * M
    assert "Copy" not in found
    assert "Portal" not in found


def test_a_single_partition_has_nothing_to_wait_for():
    assert "Wait" not in on_virtual_devices(Components(), "always", devices=(2,), skips="none")


@pytest.mark.parametrize("copy_streams", [True, False])
def test_the_runtime_makes_none_of_these_nodes(copy_streams):
    assert on_virtual_devices(Components(copy_streams=copy_streams), "always", schedule="gpipe") == {}


def test_without_gradients_there_is_no_node():
    pipe = Case((0, 1, 2), M, Components(), "always", "nested", "direct").pipe()
    with torch.no_grad():
        assert pipe(batch(2 * M, pipe.devices[0])).grad_fn is None
