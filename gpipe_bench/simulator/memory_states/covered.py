"""Which tasks live as the states of memory have it, and how long what comes into them stays."""

from __future__ import annotations

from gpipe_bench.simulator.memory.ways import kept_names
from gpipe_bench.simulator.tracing.steps import NO_BLOCK
from gpipe_bench.simulator.workloads.workload import TaskWork, input_name

__all__ = ["is_covered", "not_kept", "passed_on"]


def is_covered(work: TaskWork, *, inner: bool) -> bool:
    """Whether memory is what this file says: a task gives nothing out twice, and passes on inputs at the most.

    Args:
        work: the task.
        inner: whether it is neither of the first nor of the last partition; those pass nothing on.
    """
    names = work.leaving if inner else [name for name in work.leaving if name < NO_BLOCK]
    if any(name < NO_BLOCK for name in work.returning) or (names and not inner):
        return False
    return all(
        len({name for name in of if name != NO_BLOCK}) == sum(name != NO_BLOCK for name in of)
        for of in (work.leaving, work.returning)
    )


def not_kept(work: TaskWork) -> tuple[int, ...]:
    """Places of the inputs that the graph of a task does not keep: without a checkpoint they go when it has run."""
    kept = kept_names(work)
    return tuple(place for place in range(len(work.input_bytes)) if input_name(place) not in kept)


def passed_on(work: TaskWork) -> tuple[int, ...]:
    """Places of the inputs that a task gives out as they are."""
    return tuple(place for place in range(len(work.input_bytes)) if input_name(place) in work.leaving)
