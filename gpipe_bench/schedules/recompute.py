"""Checkpoints in a schedule: R before the backward pass of every micro-batch that is checkpointed."""

from __future__ import annotations

from gpipe_bench.schedules.actions import Action, Schedule

__all__ = ["with_recomputation"]


def with_recomputation(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule with R right before each B or I of the leading micro-batches; one that is there already stays.

    R needs nothing from another partition, so the recomputation overlaps the transfer of the gradient (Kim et al.,
    torchgpipe, arXiv 2004.09910, section 3.2.1, which calls it early recomputation).

    Args:
        schedule: any schedule.
        microbatches: how many are checkpointed: m for ``always``, m - 1 for ``except_last``, 0 for ``never``; see
            :func:`gpipe_bench.schedule.checkpoint_stop`.
    """
    there = {action for action in schedule if action.kind == "R"}
    rows: list[list[Action]] = []
    for row in schedule.devices:
        rows.append([])
        for action in row:
            recompute = Action("R", action.i, action.j)
            if action.kind in "BI" and action.i < microbatches and recompute not in there:
                rows[-1].append(recompute)
            rows[-1].append(action)
    return Schedule(tuple(map(tuple, rows)))
