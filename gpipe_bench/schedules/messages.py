"""What devices send each other, and in which order: it follows from a schedule and from the skips of a model.

F(i,j)          takes the activation of i and the skips that end in j
                sends its activation to j + 1, then each skip that begins in j to the partition that pops it
B(i,j), I(i,j)  take the gradient of i and those of the skips that begin in j
                send a gradient to j - 1, then one of each skip that ends in j to the partition that stashed it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from gpipe_bench.schedules.actions import Action, Schedule

Skips = Sequence[tuple[int, int]]
"""For each skip the partition that stashes it and the one that pops it."""


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


def taken(action: Action, partitions: int, skips: Skips) -> list[Message]:
    """What an action takes from other partitions, in order."""
    return _messages(action, partitions, skips, sends=False)


def sent(action: Action, partitions: int, skips: Skips) -> list[Message]:
    """What an action sends to other partitions, in order."""
    return _messages(action, partitions, skips, sends=True)


def _messages(action: Action, partitions: int, skips: Skips, *, sends: bool) -> list[Message]:
    kind, i, j = action
    if kind in "RW":
        return []
    way, step = ("F", 1) if kind == "F" else ("B", -1)
    # A gradient goes the other way.
    routes = [route if kind == "F" else route[::-1] for route in skips]
    if sends:
        own = [Message(way, i, j + step)] if 0 <= j + step < partitions else []
        return own + [Message(way, i, end, k) for k, (start, end) in enumerate(routes) if start == j != end]
    own = [Message(way, i, j)] if 0 <= j - step < partitions else []
    return own + [Message(way, i, j, k) for k, (start, end) in enumerate(routes) if end == j != start]


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
    n, homes = schedule.partitions, schedule.placement
    found: dict[tuple[int, int], Channel] = {}
    origins: dict[Message, int] = {}
    for action in schedule:
        for message in sent(action, n, skips):
            origins[message] = homes[action.j]
            if homes[action.j] != homes[message.j]:
                found.setdefault((homes[action.j], homes[message.j]), Channel()).sent.append((message, action))
    for action in schedule:
        for message in taken(action, n, skips):
            if origins[message] != homes[action.j]:
                found[origins[message], homes[action.j]].taken.append((message, action))
    return found
