"""How long tensors live: what a step holds on each device, in MiB, and what it leaves behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpipe_bench.components import Components
from gpipe_bench.errors import OutOfMemory
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.workload import Kernels, MemoryOp, SkipWork, SplitWork, Workload, input_name
from tests.simulator.support import MS, Plain, task, timed_tasks, workload

EXAMPLES = settings(max_examples=60)
MIB = 2**20
OUTPUT, GRAPH, GRADIENT, INPUT = 2, 30, 3, 4


def alloc(block, mib):
    return MemoryOp("alloc", block, mib * MIB)


def free(block):
    return MemoryOp("free", block)


def heavy(**options):
    """Keeps 30 MiB, its input, 4 MiB, and its output, 2 MiB, for its backward pass, which needs 3 MiB more.

    Of a split one, W frees the 30 MiB and the input.
    """
    made = task(
        forward_memory=(alloc(0, GRAPH), alloc(1, OUTPUT), free(0)),
        graph_memory=(alloc(0, GRAPH), alloc(1, OUTPUT)),
        backward_memory=(alloc(2, GRADIENT), free(0), free(1), free(input_name(0))),
        leaving=(1,),
        input_bytes=(INPUT * MIB,),
        output_bytes=(OUTPUT * MIB,),
        **options,
    )
    inputs, weights = (alloc(2, GRADIENT), free(1)), (free(0), free(input_name(0)))
    return replace(made, split=replace(made.split, inputs_memory=inputs, weights_memory=weights))


def peaks(work, *, checkpoint="always", steps=1, **switches):
    found = run(work, Plain(), Settings(Components(**switches), checkpoint, steps=steps))
    return [size / MIB for size in found.peak_live_bytes]


def test_one_partition_without_checkpoints_holds_every_graph():
    work = workload(3, [heavy()], static_bytes=(7 * MIB,))
    # All outputs together and their gradient, while the graphs are whole; then the first backward pass.
    together = 3 * OUTPUT
    assert peaks(work, checkpoint="never") == [
        7 + 3 * (INPUT + GRAPH + OUTPUT) + max(2 * together, together + GRADIENT)
    ]


def test_one_partition_with_checkpoints_holds_one_graph():
    # Inputs belong to the caller; the graph of a recomputation, its backward pass, and the gradient of the outputs.
    work = workload(3, [heavy()])
    assert peaks(work) == [3 * INPUT + GRAPH + OUTPUT + GRADIENT + 3 * OUTPUT]


def test_the_last_microbatch_keeps_its_graph_until_its_backward_pass():
    work = workload(3, [heavy()])
    whole = 3 * INPUT + GRAPH + OUTPUT
    assert peaks(work, checkpoint="except_last") == [whole + 3 * OUTPUT + max(3 * OUTPUT, GRADIENT)]


@pytest.mark.parametrize("m", [2, 5])
def test_without_fork_and_join_the_last_device_holds_every_recomputation(m):
    work = workload(m, [heavy()] * 3)
    ordered, unordered = peaks(work), peaks(work, fork_join=False)
    assert unordered[-1] - ordered[-1] == (m - 1) * (GRAPH + OUTPUT)


def test_portals_spare_the_partitions_between():
    skip = SkipWork("skip", 0, 2, {1: 8 * MIB})
    work = Workload(({1: task()}, {1: task()}, {1: task()}), (1,) * 4, (skip,))
    riding, hopping = (peaks(work, portals=on)[1] for on in (False, True))
    assert hopping < 1
    assert riding >= 4 * 8


def test_copy_streams_reserve_more_and_hold_no_more():
    work = workload(4, [heavy()] * 2)
    on, off = (run(work, Plain(), Settings(Components(copy_streams=flag), "always")) for flag in (True, False))
    assert sum(on.peak_reserved_bytes) > sum(off.peak_reserved_bytes)
    assert on.peak_live_bytes == off.peak_live_bytes


def test_a_capacity_that_does_not_suffice():
    with pytest.raises(OutOfMemory):
        run(workload(8, [heavy()]), Plain(capacity_bytes=200 * MIB), Settings(checkpoint="never"))
    run(workload(8, [heavy()]), Plain(capacity_bytes=200 * MIB), Settings(checkpoint="always"))


def test_the_host_waits_for_a_device_that_has_to_give_memory_back():
    # 30 MiB, given back to the cache, are of no use for 50 MiB.
    works = {size: task(graph_memory=(alloc(0, mib), free(0))) for size, mib in ((1, 30), (2, 50))}
    work = Workload((works,), (1, 2))
    ample, tight = (
        run(work, Plain(capacity_bytes=mib * MIB, launch_ns=MS), Settings(checkpoint="never")) for mib in (90, 70)
    )
    assert [(found.flushes, timed_tasks(found)[1].issue_ns) for found in (ample, tight)] == [
        ((0,), MS),
        ((1,), 10 * MS),
    ]
    assert [found.peak_reserved_bytes for found in (ample, tight)] == [(82 * MIB,), (52 * MIB,)]


@EXAMPLES
@given(
    m=st.integers(1, 4),
    n=st.integers(1, 4),
    components=st.sampled_from(list(Components.factorial())),
    checkpoint=st.sampled_from(["always", "except_last", "never"]),
    flavour=st.sampled_from(["current", "published"]),
    transfer=st.sampled_from(["direct", "host"]),
    shared=st.booleans(),
)
def test_a_step_leaves_nothing_behind(m, n, components, checkpoint, flavour, transfer, shared):
    skips = tuple(
        SkipWork(f"{source}{target}", source, target, {1: 3 * MIB})
        for source in range(n)
        for target in range(source + 1, n)
    )
    # Departing skips are blocks, incoming ones and inputs get gradients that the simulation allocates.
    tasks = []
    for j in range(n):
        leaving = sum(skip.source == j for skip in skips)
        outputs = tuple(alloc(10 + k, 3) for k in range(leaving))
        kept = heavy().graph_memory + outputs
        tasks.append(
            task(
                forward_memory=(*kept, free(0)),
                graph_memory=kept,
                backward_memory=heavy().backward_memory,
                leaving=(1, *(10 + k for k in range(leaving))),
                input_bytes=(INPUT * MIB,),
                output_bytes=(OUTPUT * MIB,),
            )
        )
    work = Workload(tuple({1: one} for one in tasks), (1,) * m, skips)
    devices = (0,) * n if shared else tuple(range(n))
    one, four = (
        # Where latencies vary, so does what is alive at a time.
        run(work, Plain(), Settings(components, checkpoint, flavour, transfer, devices, seed=None, steps=steps))
        for steps in (1, 4)
    )
    assert four.peak_live_bytes == one.peak_live_bytes


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb_h1"])
def test_in_both_flavours_a_schedule_gives_back_what_it_recomputed(schedule):
    """The graph keeps block 0 alone, not the output."""
    rows = (alloc(0, GRAPH), alloc(1, OUTPUT))
    split = SplitWork(Kernels(1), Kernels(1), weights_memory=(free(0),))
    one = replace(heavy(), graph_memory=rows, backward_memory=(free(0),), split=split)
    found = [
        run(workload(8, [one] * 2), Plain(), Settings(checkpoint="always", schedule=schedule, flavour=flavour))
        for flavour in ("current", "published")
    ]
    assert found[0].peak_live_bytes == found[1].peak_live_bytes
