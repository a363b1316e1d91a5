"""Gradients of parameters, in MiB: a weight of 30 whose gradient is a view, as that of a linear layer, or is not.

The batch, the outputs and their gradient take 1 for each micro-batch.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.workload import Kernels, MemoryOp, SplitWork, StaticMemory, Workload
from tests.simulator.support import Plain, task
from tests.simulator.test_lives import MIB, alloc, free

WEIGHT = 30


def step(kind="view", temporary=0):
    """Its backward pass holds ``temporary`` MiB all the time."""
    rows = (alloc(1, temporary), alloc(0, WEIGHT), MemoryOp(kind, 0), free(1))
    split = SplitWork(Kernels(1), Kernels(1), weights_memory=rows)
    return task(input_bytes=(MIB,), output_bytes=(MIB,), backward_memory=rows, split=split)


def peak(*works, checkpoint="never", gradients=WEIGHT, **options):
    """Of a device with one partition, and a micro-batch for each work, the last of which runs backward first."""
    sizes = tuple(range(1, 1 + len(works)))
    static = (StaticMemory(gradients=gradients * MIB),)
    work = Workload((dict(zip(sizes, works, strict=True)),), sizes, static=static)
    return run(work, Plain(), Settings(checkpoint=checkpoint, **options)).peak_live_bytes[0] / MIB


def test_the_second_gradient_that_is_a_view_is_added_out_of_place():
    # While it is added there are both and their sum, which takes the place of the first.
    assert peak(step(), step()) == 2 + 2 + 3 * WEIGHT
    assert peak(step("gradient"), step("gradient")) == 2 + 2 + 2 * WEIGHT


def test_a_third_one_is_added_in_place():
    assert peak(step(temporary=40), step(), step()) == 3 + 3 + 40 + 2 * WEIGHT


def test_a_single_one_is_added_to_nothing_in_any_step():
    assert [peak(step(), steps=steps) for steps in (1, 2)] == [1 + 1 + WEIGHT] * 2


@pytest.mark.parametrize(
    "options",
    [{"checkpoint": "always"}, {"checkpoint": "except_last"}, {"flavour": "published"}, {"schedule": "gpipe"}],
    ids=str,
)
def test_checkpoints_schedules_and_the_published_engine_add_in_place(options):
    # The published engine sets gradients to zero and keeps them; a schedule has a loss for each micro-batch.
    left = 2 + (1 if "schedule" in options else 2)
    assert peak(step(), step(), **options) == left + 2 * WEIGHT


@pytest.mark.parametrize(("flavour", "kept"), [("current", 0), ("published", WEIGHT)])
def test_gradients_are_given_up_between_steps_or_kept(flavour, kept):
    # The forward pass of the second step needs 50.
    rows = (alloc(2, 50), free(2))
    work = replace(step("gradient"), graph_memory=rows)
    assert peak(work, flavour=flavour, steps=2) == max(1 + 50 + kept, 1 + 1 + WEIGHT + kept)


def test_gradients_that_are_no_blocks_of_the_backward_pass_come_at_its_end():
    assert peak(step("gradient"), gradients=WEIGHT + 7) == 1 + 1 + WEIGHT + 7


def test_of_a_split_backward_pass_the_second_half_makes_them():
    assert peak(step("gradient"), step("gradient"), schedule="zb_h1") == 2 + 1 + 2 * WEIGHT
