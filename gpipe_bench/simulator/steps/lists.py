"""Lists of actions, each run by a thread, with a loss for each micro-batch: schedules as engine/runtime runs them.

    F     until the micro-batch and its skips have come; compute; send what leaves, skips by their portals
    R     compute once more
    B I   of the first micro-batches, ``ahead``: compute once more; until gradients have come; recompute if that is
          still to be done; run backward; send gradients and those of skips to where they came from
    W     the gradients of the weights

No node stands between the tasks, so there is no autograd.
"""

from __future__ import annotations

from collections import defaultdict

from gpipe_bench.schedules import Action, Schedule, merged_order, with_recomputation
from gpipe_bench.schedules.program import Plan
from gpipe_bench.simulator.steps.issue import CELL, OPEN, Issuer
from gpipe_bench.simulator.steps.writer import CALLER


def run_lists(schedule: Schedule, issuer: Issuer, plan: Plan[int], *, workers: bool) -> None:
    """Write the passes of one step; ``workers``: whether each device has a thread of its own."""
    layout, writer = issuer.layout, issuer.writer
    # A thread for each accelerator; on the CPU one for each device of the schedule; or one for all.
    groups = (0,) * plan.n if not workers else layout.devices if issuer.settings.streams else layout.ranks
    ahead = plan.checkpointed if plan.components.early_recompute else 0
    rows_of = defaultdict[int, set[int]](set)
    for row, group in zip(layout.ranks, groups, strict=True):
        rows_of[group].add(row)
    if any(len(rows) > 1 for rows in rows_of.values()):
        # In one order of all actions, recomputations have a place of their own.
        actions, ahead = merged_order(with_recomputation(schedule, ahead)), 0
    else:
        actions = merged_order(schedule)
    thread_of = {group: 1 + number for number, group in enumerate(rows_of)}
    started = {thread: writer.signal(CALLER) for thread in thread_of.values()}
    for thread, version in started.items():
        writer.awaits(thread, version)
    runner = _Lists(issuer, plan, ahead, actions)
    for action in actions:
        runner.run(thread_of[groups[action.j]], action)
    for version in [writer.signal(thread) for thread in thread_of.values()]:
        writer.awaits(CALLER, version)


class _Lists:
    def __init__(self, issuer: Issuer, plan: Plan[int], ahead: int, actions: list[Action]) -> None:
        self._issuer, self._writer, self._layout, self._plan = issuer, issuer.writer, issuer.layout, plan
        self._ahead = ahead
        self._again = {(i, j) for kind, i, j in actions if kind == "R"}
        self._filled = set[tuple[int, int]]()
        self._messages = defaultdict[tuple[int, int], list[int]](list)
        self._gradients: dict[tuple[int, int], int] = {}
        self._portals = plan.components.portals

    def run(self, thread: int, action: Action) -> None:
        """Write the rows of an action."""
        kind, i, j = action
        if kind == "F":
            self._forward(thread, i, j)
        elif kind == "R":
            self._recompute(thread, i, j)
        elif kind == "W":
            if self._issuer.work.task(i, j).learns:
                self._issuer.run(thread, "backward_weights", i, j)
        else:
            self._backward(thread, i, j, "backward" if kind == "B" else "backward_inputs")

    def _forward(self, thread: int, i: int, j: int) -> None:
        copying, computing = self._layout.copying[j][i], self._layout.computing[j]
        for version in self._messages.pop((i, j), ()):
            self._writer.awaits(thread, version)
        self._writer.order(thread, computing, copying)
        self._issuer.run(thread, "forward", i, j, CELL if self._has_checkpoint(i, j) else OPEN)
        self._writer.order(thread, copying, computing)
        self._issuer.tell(thread, "collect", i, j)
        if j == self._plan.n - 1:
            return
        given = [k for k, skip in enumerate(self._issuer.work.skips) if skip.giver == j] if self._portals else []
        for skip in (None, *given):
            target = j + 1 if skip is None else self._issuer.work.skips[skip].target
            if self._layout.moves(j, target):
                self._issuer.transfer(thread, i, target, skip)
            self._messages[i, target].append(self._writer.signal(thread))

    def _has_checkpoint(self, i: int, j: int) -> bool:
        return (self._plan.checkpoints(i) or (i, j) in self._again) and self._issuer.work.task(i, j).learns

    def _recompute(self, thread: int, i: int, j: int) -> None:
        """Fill a checkpoint that is not filled yet."""
        if self._has_checkpoint(i, j) and (i, j) not in self._filled:
            self._filled.add((i, j))
            self._issuer.run(thread, "recompute", i, j)

    def _backward(self, thread: int, i: int, j: int, kind: str) -> None:
        copying, computing = self._layout.copying[j][i], self._layout.computing[j]
        if i < self._ahead:
            self._recompute(thread, i, j)
        if j < self._plan.n - 1:
            self._writer.awaits(thread, self._gradients.pop((i, j)))
        else:
            self._issuer.tell(thread, "microbatch_loss", i, j)
            self._issuer.loss(thread, i)
        self._writer.order(thread, computing, copying)
        if self._issuer.work.task(i, j).learns:
            self._recompute(thread, i, j)
            self._issuer.run(thread, kind, i, j)
        self._writer.order(thread, copying, computing)
        if not j:
            return
        for skip in (None, *(self._issuer.incoming[j] if self._portals else ())):
            source = j - 1 if skip is None else self._issuer.work.skips[skip].source
            if self._layout.moves(source, j) and self._issuer.returns(i, j, skip):
                self._issuer.transfer(thread, i, j, skip, back=True)
        self._gradients[i, j - 1] = self._writer.signal(thread)
