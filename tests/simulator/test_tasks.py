"""What is told of each task: when, where and on which stream it ran, and its bytes. Times are in milliseconds."""

from __future__ import annotations

from gpipe_bench.components import Components
from gpipe_bench.simulator.steps.run import Settings, run
from gpipe_bench.simulator.workloads.workload import Kernels
from tests.simulator.support import MS, Plain, task, timed_tasks, workload


def tasks(work, **options):
    """In the order of issue."""
    return [
        (one.kind, one.j, one.device, one.stream, one.nbytes, one.start_ns // MS, one.end_ns // MS)
        for one in timed_tasks(run(work, Plain(copy=MS), Settings(**options)))
    ]


def pair():
    return workload(1, [task(input_bytes=(5,), output_bytes=(7,))] * 2)


def test_tasks_of_two_partitions():
    assert tasks(pair(), checkpoint="always", devices=(1, 0)) == [
        ("forward", 0, 1, "compute", 7, 0, 10),
        ("copy", 1, 1, "copy", 5, 10, 11),
        ("forward", 1, 0, "compute", 7, 11, 21),
        ("recompute", 1, 0, "compute", 7, 21, 31),
        ("backward", 1, 0, "compute", 0, 31, 51),
        ("copy_grad", 1, 0, "copy", 5, 51, 52),
        # Its compute stream has nothing else to do since 10.
        ("recompute", 0, 1, "compute", 7, 10, 20),
        ("backward", 0, 1, "compute", 0, 52, 72),
    ]


def test_without_copy_streams_a_copy_is_on_the_compute_streams_of_both():
    found = tasks(pair(), checkpoint="always", devices=(1, 0), components=Components(copy_streams=False))
    assert found[1] == ("copy", 1, 1, "compute", 5, 10, 11)
    assert found[5:] == [
        ("copy_grad", 1, 0, "compute", 5, 51, 52),
        ("recompute", 0, 1, "compute", 7, 52, 62),
        ("backward", 0, 1, "compute", 0, 62, 82),
    ]


def test_a_skip_goes_by_its_portal_in_both_directions():
    found = tasks(workload(1, [task()] * 3, [(0, 2)]), checkpoint="never")
    assert [one for one in found if one[0].startswith("portal")] == [
        # The link of device 0 sends the micro-batch first, that of device 2 its gradient.
        ("portal", 2, 0, "copy", 1, 11, 12),
        ("portal_grad", 2, 2, "copy", 1, 53, 54),
    ]
    # The first partition needs the gradient of the skip no sooner than that of its output.
    assert found[-1] == ("backward", 0, 0, "compute", 0, 74, 94)


def test_each_tensor_goes_through_the_memory_of_the_host_by_itself():
    #   down  10-11  11-12           Plain takes as long to the host as from it
    #   up           11-12  12-13
    two = task(input_bytes=(5, 6), output_bytes=(5, 6))
    found = tasks(workload(1, [two] * 2), checkpoint="never", transfer="host")
    assert [one for one in found if one[0].startswith("copy")] == [
        ("copy", 1, 0, "copy", 11, 10, 13),
        ("copy_grad", 1, 1, "copy", 11, 43, 46),
    ]


def test_each_of_them_is_launched_after_the_one_before():
    two = task(0, 0, 0, input_bytes=(5, 6), output_bytes=(5, 6))
    found = run(workload(1, [two] * 2), Plain(copy=MS, launch_ns=5 * MS), Settings(checkpoint="never", transfer="host"))
    copy = next(one for one in timed_tasks(found) if one.kind == "copy")
    # Down until 5 and 15, up until 10 and 20, when the host has issued each.
    assert (copy.start_ns, copy.end_ns) == (0, 20 * MS)


def test_what_comes_to_the_last_partition_in_the_next_step_does_not_wait_for_the_loss_of_this_one():
    #   device 0   F F │ F F            the first partition learns nothing, so that nothing goes back
    #   device 1     F F loss B B
    work = workload(2, [task(learns=False), task(returns=(False,))], loss=Kernels(30 * MS, 1))
    copies = [one for one in tasks(work, checkpoint="never", steps=2) if one[0] == "copy"]
    assert [start for *_, start, _ in copies] == [10, 20, 30, 40]
