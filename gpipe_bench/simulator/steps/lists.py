"""Lists of actions, each run by a thread, with a loss for each micro-batch: schedules as engine/runtime runs them.

    F     until the micro-batch and its skips have come; compute; send what leaves, skips by their portals
    R     compute once more
    B I   of the first micro-batches, ``ahead``: compute once more; until gradients have come; recompute if that is
          still to be done; run backward; send gradients and those of skips to where they came from
    W     the gradients of the weights

No node stands between the tasks, so there is no autograd.

A list with messages is run as PyTorch's pipelining runs it: each end of a message is issued where it stands, an action
waits for the message that it takes, and the update for all of them. Skips go by their portals as above.
"""

from __future__ import annotations

from collections import defaultdict

from gpipe_bench.schedules import Action, Schedule, merged_order, with_recomputation
from gpipe_bench.schedules.actions import MessageEnd
from gpipe_bench.schedules.program import Plan
from gpipe_bench.simulator.steps.issue import CELL, OPEN, Issuer
from gpipe_bench.simulator.steps.writer import CALLER, Stream


def run_lists(schedule: Schedule, issuer: Issuer, plan: Plan[int], *, workers: bool) -> None:
    """Write the passes of one step; ``workers``: whether each device has a thread of its own."""
    layout, writer = issuer.layout, issuer.writer
    # A thread for each accelerator; on the CPU one for each device of the schedule; or one for all.
    groups = (0,) * plan.n if not workers else layout.devices if issuer.settings.streams else layout.ranks
    ahead = plan.checkpointed if plan.components.early_recompute else 0
    rows_of = defaultdict[int, set[int]](set)
    for row, group in zip(layout.ranks, groups, strict=True):
        rows_of[group].add(row)
    # What the first of a pair gives may be sent after both, and others take it later still.
    pairs = schedule.pairs if schedule.messages else ()
    if any(len(rows) > 1 for rows in rows_of.values()):
        # In one order of all actions, recomputations have a place of their own.
        actions, ahead = merged_order(with_recomputation(schedule, ahead), pairs), 0
    else:
        actions = merged_order(schedule, pairs)
    thread_of = {group: 1 + number for number, group in enumerate(rows_of)}
    started = {thread: writer.signal(CALLER) for thread in thread_of.values()}
    for thread, version in started.items():
        writer.awaits(thread, version)
    runner = _Lists(issuer, plan, ahead, actions, placed=bool(schedule.messages))
    following = _ends_after(schedule)
    for place in (None, *actions):
        if place is not None:
            runner.run(thread_of[groups[place.j]], place)
        for end in following[place]:
            runner.issue(thread_of[groups[end.j]], end)
    runner.finish()
    for version in [writer.signal(thread) for thread in thread_of.values()]:
        writer.awaits(CALLER, version)


def _ends_after(schedule: Schedule) -> defaultdict[Action | None, list[MessageEnd]]:
    """The ends of messages that follow each action in its list; None: those before the first action of a list."""
    found = defaultdict[Action | None, list[MessageEnd]](list)
    for row in schedule.messages:
        last = None
        for one in row:
            if isinstance(one, MessageEnd):
                found[last].append(one)
            else:
                last = one
    return found


class _Lists:
    def __init__(self, issuer: Issuer, plan: Plan[int], ahead: int, actions: list[Action], *, placed: bool) -> None:
        self._issuer, self._writer, self._layout, self._plan = issuer, issuer.writer, issuer.layout, plan
        self._ahead = ahead
        self._again = {(i, j) for kind, i, j in actions if kind == "R"}
        self._filled = set[tuple[int, int]]()
        self._messages = defaultdict[tuple[str, int, int], list[int]](list)
        self._portals = plan.components.portals
        self._placed = placed
        self._events: dict[MessageEnd, int] = {}
        self._latest: dict[tuple[int, Stream], tuple[Stream, int]] = {}

    def issue(self, thread: int, end: MessageEnd) -> None:
        """Write the rows of an end of a message that its list places."""
        event = self._issuer.meet(thread, end)
        if event:
            self._events[end] = event
            own = self._issuer.between(end.j, end.other.j)
            self._latest[thread, own] = self._layout.computing[end.j], event
        if end.sends:
            # Memory alone needs that a message is sent before somebody takes it, in the order of host threads.
            self._messages[end.way, end.i, end.other.j].append(self._writer.signal(thread))

    def finish(self) -> None:
        """What comes after the lists waits for the last message of each stream."""
        for (thread, _), (computing, event) in self._latest.items():
            self._writer.wait(thread, computing, event)

    def _takes(self, thread: int, way: str, i: int, j: int) -> None:
        """Write the rows with which a task waits for its message and its skips."""
        for version in self._messages.pop((way, i, j), ()):
            self._writer.awaits(thread, version)
        if event := self._events.get(MessageEnd(False, way, i, j)):
            self._writer.wait(thread, self._layout.computing[j], event)

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
        self._takes(thread, "F", i, j)
        self._writer.order(thread, computing, copying)
        self._issuer.run(thread, "forward", i, j, CELL if self._has_checkpoint(i, j) else OPEN)
        self._writer.order(thread, copying, computing)
        self._issuer.tell(thread, "collect", i, j)
        if j == self._plan.n - 1:
            return
        given = [k for k, skip in enumerate(self._issuer.work.skips) if skip.giver == j] if self._portals else []
        for skip in (None, *given):
            target = j + 1 if skip is None else self._issuer.work.skips[skip].target
            if self._is_placed(j, target, skip):
                continue
            if self._layout.moves(j, target):
                self._issuer.transfer(thread, i, target, skip)
            self._messages["F", i, target].append(self._writer.signal(thread))

    def _is_placed(self, j: int, target: int, skip: int | None) -> bool:
        """Whether the list itself has the message."""
        return self._placed and skip is None and self._layout.ranks[j] != self._layout.ranks[target]

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
            self._takes(thread, "B", i, j)
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
            if self._is_placed(j, source, skip):
                continue
            if self._layout.moves(source, j) and self._issuer.returns(i, j, skip):
                self._issuer.transfer(thread, i, j, skip, back=True)
        self._messages["B", i, j - 1].append(self._writer.signal(thread))
