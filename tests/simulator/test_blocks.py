"""Which blocks a device has in use, in MiB: outputs and gradients that are given up, passed on, or shared."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpipe_bench.schedules import Schedule
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.workload import Kernels, MemoryOp, SplitWork, gradient_name, input_name
from tests.simulator.support import Plain, task, workload
from tests.simulator.test_lives import MIB, alloc, free

IN, OUT, MORE = 4, 20, 50
GIVES_UP = (free(gradient_name(0)), alloc(2, MORE), free(2))


def sizes(*mib):
    return tuple(one * MIB for one in mib)


def plain(**options):
    """Its inputs and outputs are all that it holds."""
    return task(**{"input_bytes": sizes(IN), "output_bytes": sizes(OUT), **options})


def memory(m, *tasks, checkpoint="never", device=0, **options):
    return run(workload(m, tasks), Plain(), Settings(checkpoint=checkpoint, **options)).memory[device]


def peak(*arguments, **options):
    return memory(*arguments, **options).peak_live / MIB


# --- gradients that a pass gives up ----------------------------------------------------------------------------------


def test_a_gradient_goes_when_the_pass_needs_it_no_longer():
    assert peak(1, plain(backward_memory=GIVES_UP)) == IN + MORE


def test_but_not_while_another_microbatch_needs_it():
    # The gradient of both outputs is one block; without the second to need it, it goes.
    assert peak(2, plain(backward_memory=GIVES_UP)) == 2 * IN + 2 * OUT + MORE


def test_a_checkpoint_holds_it_until_its_pass_is_over():
    assert peak(1, plain(backward_memory=GIVES_UP), checkpoint="always") == IN + OUT + MORE


def test_a_schedule_hands_it_over_if_it_is_the_only_one():
    assert peak(1, plain(backward_memory=GIVES_UP), schedule="gpipe") == IN + MORE
    two = plain(backward_memory=GIVES_UP, output_bytes=sizes(OUT, 1))
    assert peak(1, two, schedule="gpipe") == IN + OUT + 1 + MORE


def test_what_was_given_up_is_counted_once():
    odd = plain(backward_memory=GIVES_UP, output_bytes=(OUT * MIB + 1,))
    left = memory(1, odd)
    assert (left.live, left.allocated) == (IN * MIB, IN * MIB)


# --- outputs and gradients that are one block ------------------------------------------------------------------------


def test_two_outputs_that_are_one_tensor_are_one_block():
    rows = (alloc(1, OUT),)
    twin = plain(graph_memory=rows, leaving=(1, 1), output_bytes=sizes(OUT, OUT))
    left = memory(2, twin, steps=2)
    # The outputs of the batch and their concatenation; then that and its gradient.
    assert left.peak_live / MIB == 2 * IN + max(2 * OUT + 4 * OUT, 2 * 4 * OUT)
    assert left.live / MIB == 2 * IN


def test_one_tensor_that_comes_twice_lives_while_one_of_them_is_needed():
    first = plain(graph_memory=(alloc(1, OUT),), leaving=(1, 1), output_bytes=sizes(OUT, OUT))
    needs = (alloc(2, MORE), free(2), free(input_name(0)))
    second = plain(input_bytes=sizes(OUT, OUT), output_bytes=sizes(1), backward_memory=needs)
    # The batch, what the second keeps, the gradient of the loss.
    assert peak(1, first, second, devices=(0, 0)) == IN + OUT + 1 + MORE


def test_two_gradients_that_are_one_tensor_are_one_block():
    # Both partitions are on one device: the batch, the gradient of the loss, and what comes back.
    second = plain(input_bytes=sizes(1, 1), output_bytes=sizes(1), backward_memory=(alloc(3, MORE),), returning=(3, 3))
    found = memory(1, plain(output_bytes=sizes(1, 1)), second, devices=(0, 0))
    assert (found.peak_live / MIB, found.live / MIB) == (IN + 1 + MORE, IN)


def test_gradients_of_the_batch_are_of_no_use():
    one = plain(backward_memory=(alloc(3, MORE),), returning=(3,))
    # The outputs and their concatenation; then its gradient, and one gradient of the batch at a time.
    assert peak(3, one) == 3 * IN + max(2 * 3 * OUT, 3 * OUT + MORE)
    assert memory(3, one).live / MIB == 3 * IN


@pytest.mark.parametrize(("returns", "comes_back"), [((True, True), 30 + 10), ((True, False), 30), ((False, True), 10)])
@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_gradients_come_back_for_inputs_that_have_one(returns, comes_back, schedule):
    first = plain(output_bytes=sizes(30, 10), backward_memory=(alloc(2, MORE), free(2)))
    second = plain(input_bytes=sizes(30, 10), output_bytes=sizes(1), returns=returns)
    assert peak(1, first, second, schedule=schedule) == IN + comes_back + MORE
    left = memory(1, first, second, schedule=schedule, steps=2)
    assert left.live / MIB == IN


def test_an_input_that_is_passed_on_is_one_block():
    through = plain(input_bytes=sizes(OUT), leaving=(input_name(0),), returning=(gradient_name(0),))
    found = memory(1, plain(), through, plain(input_bytes=sizes(OUT), output_bytes=sizes(1)), device=1)
    assert (found.peak_live / MIB, found.live) == (OUT, 0)


# --- recomputation ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flavour", "output"), [("current", 0), ("published", OUT)])
def test_the_published_engine_holds_the_output_of_a_recomputation(flavour, output):
    rows = (alloc(0, 30), alloc(1, OUT))
    one = plain(
        graph_memory=rows, backward_memory=(alloc(2, MORE), free(2)), leaving=(1,), forward_memory=(alloc(1, OUT),)
    )
    assert peak(1, one, checkpoint="always", flavour=flavour) == IN + OUT + 30 + output + MORE


# --- tasks without checkpoint beside others with one: each is one node -----------------------------------------------


def beside_checkpoints(**options):
    """Peak of the second of three partitions, of which the first learns nothing, where one of two has a checkpoint."""
    first = plain(learns=False)
    second = plain(input_bytes=sizes(OUT), output_bytes=sizes(OUT), returns=(False,), **options)
    third = plain(input_bytes=sizes(OUT), output_bytes=sizes(1))
    return peak(2, first, second, third, checkpoint="except_last", device=1)


def test_one_node_holds_the_gradient_that_it_was_given_and_no_inputs():
    # The inputs of the checkpoint, and the gradient, though the pass gives it up.
    held = beside_checkpoints(backward_memory=(alloc(2, MORE), free(2)))
    assert beside_checkpoints(backward_memory=GIVES_UP) == held == OUT + OUT + MORE


# --- a backward pass in two halves -----------------------------------------------------------------------------------

HALVES = Schedule.of([[("F", 0, 0), ("I", 0, 0), ("W", 0, 0)]])


def halves(inputs, weights, returning=()):
    """I and W; the graph keeps two blocks, of 30 and 10."""
    split = SplitWork(Kernels(1), Kernels(1), inputs, weights, returning)
    return plain(graph_memory=(alloc(0, 30), alloc(1, 10)), split=split)


def test_the_first_half_frees_what_it_is_the_last_to_need():
    needs = (free(0), free(gradient_name(0))), (alloc(2, 100), free(1), free(2))
    assert peak(1, halves(*needs), schedule=HALVES) == IN + 10 + 100
    later = (free(0),), (alloc(2, 100), free(1), free(2), free(gradient_name(0)))
    assert peak(1, halves(*later), schedule=HALVES) == IN + 10 + OUT + 100


def test_a_gradient_that_both_halves_need_lives_until_the_second_is_over():
    rows = (free(0), alloc(3, 7)), (alloc(2, MORE), free(1), free(2), free(3))
    assert peak(1, halves(*rows, (3,)), schedule=HALVES) == IN + 10 + 7 + OUT + MORE
    assert memory(1, halves(*rows, (3,)), schedule=HALVES).live / MIB == IN


def test_a_task_that_is_not_split_does_all_in_the_first_half():
    whole = (alloc(2, MORE), free(0), free(1), free(2))
    work = replace(halves(whole, ()), backward_memory=whole)
    found = memory(1, work, schedule=HALVES)
    assert (found.peak_live / MIB, found.live / MIB) == (IN + 40 + OUT + MORE, IN)


# --- the allocator's view --------------------------------------------------------------------------------------------


def test_what_is_given_back_at_once_takes_a_block_all_the_same():
    rows = (MemoryOp("alloc", 0, 11 * MIB), free(0))
    found = memory(1, task(input_bytes=(512,), output_bytes=(512,), graph_memory=rows))
    # A segment of 12 MiB is not split if no more than 1 MiB is left.
    assert (found.peak_live, found.peak_allocated) == (11 * MIB + 512, 12 * MIB + 512)


def test_kernels_do_without_scratch_memory_for_which_there_is_no_room():
    rows = (alloc(1, 12), MemoryOp("scratch", 7, 30 * MIB), free(1))
    one = task(graph_memory=rows, backward_memory=rows)
    found = run(workload(2, [one]), Plain(capacity_bytes=40 * MIB), Settings(checkpoint="never")).memory[0]
    # One try, which gives cached memory back; then none.
    assert (found.flushes, found.peak_reserved) == (1, 14 * MIB)


def test_tensors_of_many_tebibytes():
    rows = tuple(MemoryOp("alloc", block, size << 40) for block, size in ((1, 5), (2, 3)))
    found = memory(1, task(graph_memory=rows))
    assert found.peak_reserved == (8 << 40) + 2 * MIB
