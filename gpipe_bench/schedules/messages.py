"""What devices send each other, and in which order: it follows from a schedule and from the skips of a model.

F(i,j)          takes the activation of i and the skips that j reads
                sends its activation to j + 1, then each skip to the partitions that take it from j
B(i,j), I(i,j)  take the gradient of i and those of the skips that go on from j
                send a gradient to j - 1, then one of each skip that j reads to the partition before j in its chain

The chain of a skip is the partition that stashes it, then those that read it, in order. Each device receives a skip
once: a partition takes it from the last one before it in the chain on its own device, or else from the one before it.
Gradients go back along the chain, and each partition adds its own: this is the order of the plain module.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpipe_bench.schedules.actions import Action, MessageEnd, Schedule, in_pairs

Skips = Sequence[tuple[int, ...]]
"""For each skip the partition that stashes it, then those that read it, in order."""


class Message(NamedTuple):
    """What one action gives and another one takes."""

    way: str
    """``F``, an activation, or ``B``, a gradient."""
    i: int
    """Micro-batch."""
    j: int
    """The partition that takes it."""
    skip: int | None = None
    """Which skip it belongs to; None for the values of the micro-batch itself."""

    def __str__(self) -> str:
        what = "activation" if self.way == "F" else "gradient"
        what = what if self.skip is None else f"{what} of skip {self.skip}"
        return f"{what} of micro-batch {self.i} to partition {self.j}"


def holder(chain: Sequence[int], j: int, placement: Sequence[Hashable]) -> int:
    """The partition from which partition j takes a skip: see above; ``placement``: the rank of each partition."""
    before = chain[: chain.index(j)]
    return next((each for each in reversed(before) if placement[each] == placement[j]), before[-1])


def taken(action: Action, placement: Sequence[int], skips: Skips) -> list[Message]:
    """What an action takes from other partitions, in order; ``placement``: the rank of each partition."""
    kind, i, j = action
    if kind == "F":
        own = [Message("F", i, j)] * (j > 0)
        return own + [Message("F", i, j, k) for k, chain in enumerate(_chains(skips)) if j in chain[1:]]
    if kind in "BI":
        own = [Message("B", i, j)] * (j < len(placement) - 1)
        return own + [Message("B", i, j, k) for k, chain in enumerate(_chains(skips)) if j in chain[:-1]]
    return []


def sent(action: Action, placement: Sequence[int], skips: Skips) -> list[Message]:
    """What an action sends to other partitions, in order; ``placement``: the rank of each partition."""
    kind, i, j = action
    if kind == "F":
        own = [Message("F", i, j + 1)] * (j < len(placement) - 1)
        ends = [
            (k, end)
            for k, chain in enumerate(_chains(skips))
            for end in chain[1:]
            if j in chain and holder(chain, end, placement) == j
        ]
        return own + [Message("F", i, end, k) for k, end in ends]
    if kind in "BI":
        own = [Message("B", i, j - 1)] * (j > 0)
        ends = [(k, chain[chain.index(j) - 1]) for k, chain in enumerate(_chains(skips)) if j in chain[1:]]
        return own + [Message("B", i, end, k) for k, end in ends]
    return []


def with_messages(schedule: Schedule) -> Schedule:
    """The schedule with its messages where PyTorch's ``ScheduleGPipe`` has them.

    Each is received right before the action that takes it, and sent right after the action that gives it. Those of a
    pair are received before both, and sent after both, as in PyTorch's ``ScheduleDualPipeV``.
    """
    placement = schedule.placement
    rows: list[tuple[Action | MessageEnd, ...]] = []
    for row in schedule.devices:
        listed: list[Action | MessageEnd] = []
        for actions in in_pairs(row, schedule.pairs):
            listed += _ends((one for action in actions for one in taken(action, placement, ())), placement)
            listed += actions
            given = _ends((one for action in actions for one in sent(action, placement, ())), placement)
            listed += [end.other for end in given]
        rows.append(tuple(listed))
    return replace(schedule, messages=tuple(rows))


def _ends(messages: Iterable[Message], placement: Sequence[int]) -> list[MessageEnd]:
    """Where messages are received, if they leave their device."""
    ends = [MessageEnd(False, way, i, j) for way, i, j, _ in messages]
    return [end for end in ends if placement[end.j] != placement[end.other.j]]


def _chains(skips: Skips) -> Iterator[tuple[int, ...]]:
    """Without partitions that occur again, where a skip is read in its own partition or by several layers of one."""
    return (tuple(dict.fromkeys(skip)) for skip in skips)


@dataclass(slots=True)
class Channel:
    """All messages from one device to another, with the actions that send and take them.

    Attributes:
        sent: in the order in which the sender sends them.
        taken: in the order in which the receiver needs them.
    """

    sent: list[tuple[Message, Action]] = field(default_factory=list)
    taken: list[tuple[Message, Action]] = field(default_factory=list)


def channels(schedule: Schedule, skips: Skips = ()) -> dict[tuple[int, int], Channel]:
    """The channel of each pair (sender, receiver) of devices between which anything travels."""
    placement = schedule.placement
    found: dict[tuple[int, int], Channel] = {}
    origins: dict[Message, int] = {}
    for action in schedule:
        for message in sent(action, placement, skips):
            origins[message] = placement[action.j]
            if placement[action.j] != placement[message.j]:
                found.setdefault((placement[action.j], placement[message.j]), Channel()).sent.append((message, action))
    for action in schedule:
        for message in taken(action, placement, skips):
            if origins[message] != placement[action.j]:
                found[origins[message], placement[action.j]].taken.append((message, action))
    return found
