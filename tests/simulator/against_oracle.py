"""The clock in C against the one in Python: everything that can be seen of a run."""

from __future__ import annotations

from itertools import zip_longest

from gpipe_bench.errors import OutOfMemory
from gpipe_bench.schedules.cycles import checkpoint_stop
from gpipe_bench.simulator.clock.run import run
from tests.simulator.oracle.run import run_whole
from tests.simulator.support import SANITIZED

PEAKS = ("peak_live", "peak_allocated", "peak_reserved")


def by_oracle(work, machine, chosen):
    try:
        done = run_whole(work, machine, chosen)
    except OutOfMemory as error:
        return [], vars(error)
    memory = [getattr(done, f"{name}_bytes") for name in PEAKS] + [done.flushes]
    tasks = [
        (one.kind, one.i, one.j, one.device, one.stream, one.issue_ns, one.first.start, one.last.end, one.nbytes)
        for one in done.issued
    ]
    return tasks, (done.makespan_ns, done.step_ends_ns, *memory)


def by_clock(work, machine, chosen):
    try:
        done = run(work, machine, chosen)
    except OutOfMemory as error:
        return [], vars(error)
    memory = [getattr(done, f"{name}_bytes") for name in PEAKS] + [done.flushes]
    tasks = [
        (one.kind, one.i, one.j, one.device, one.stream, one.issue_ns, one.start_ns, one.end_ns, one.nbytes)
        for one in done.issued
    ]
    return tasks, (done.makespan_ns, done.step_ends_ns, *memory)


def same(work, machine, chosen):
    """Check that both give the same tasks in the same order at the same times, and the same memory.

    With sanitizers, which see what the clock in C does to memory, only small runs are compared: others take too long.
    """
    work = work.chosen(checkpoint_stop(chosen.checkpoint, work.m))
    tasks, found = by_clock(work, machine, chosen)
    if SANITIZED and len(tasks) > 80:
        return
    expected_tasks, expected = by_oracle(work, machine, chosen)
    for number, (task, expected_task) in enumerate(zip_longest(tasks, expected_tasks)):
        assert task == expected_task, number
    assert found == expected
