"""A schedule as data: the actions of each device, in the order in which the device takes them.

    F  forward pass                                   T_F
    R  recompute the forward pass of a checkpoint     T_F
    B  backward pass: I and W at once                 T_B + T_W
    I  backward pass of the inputs alone              T_B
    W  backward pass of the weights alone             T_W

Every action belongs to one micro-batch i and one partition j. Zero Bubble (arXiv 2401.10241, section 2) splits B into
I and W, which it calls B and W: only I is waited for by another partition.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, islice, pairwise
from typing import Final, NamedTuple, TypeVar

KINDS: Final = ("F", "R", "B", "I", "W")
"""Kinds of actions: forward, recomputation, backward, and the halves of a backward: of the inputs, of the weights."""


class Action(NamedTuple):
    """One action of a schedule; ``str`` gives it as ``F(i,j)``."""

    kind: str
    """One of :data:`KINDS`."""
    i: int
    """Micro-batch, from 0."""
    j: int
    """Partition, from 0."""

    def __str__(self) -> str:
        return f"{self.kind}({self.i},{self.j})"


_Listed = TypeVar("_Listed", bound="Action | MessageEnd")


class MessageEnd(NamedTuple):
    """One end of a message, where a list puts it: a SEND or a RECV of PyTorch's lists."""

    sends: bool
    """Whether this is the send, or else the receive."""
    way: str
    """``F``, an activation, or ``B``, a gradient."""
    i: int
    """Micro-batch."""
    j: int
    """Partition of this end."""

    @property
    def other(self) -> MessageEnd:
        """The other end."""
        step = 1 if self.sends == (self.way == "F") else -1
        return MessageEnd(not self.sends, self.way, self.i, self.j + step)

    def __str__(self) -> str:
        return f"{self.j}{'SEND' if self.sends else 'RECV'}_{self.way}{self.i}"


@dataclass(frozen=True)
class Schedule:
    """The actions of all devices.

    Attributes:
        devices: for each device its actions, in order.
        pairs: the actions that are meant to overlap the next one of their device.
        messages: for each device the same actions, with the ends of messages where it begins them; empty: a runtime
            decides. Simulations keep to it, and this project's runtimes do not.
    """

    devices: tuple[tuple[Action, ...], ...]
    pairs: frozenset[Action] = frozenset()
    messages: tuple[tuple[Action | MessageEnd, ...], ...] = ()

    @classmethod
    def of(cls, devices: Iterable[Iterable[tuple[str, int, int]]], pairs: Iterable[Action] = ()) -> Schedule:
        """The schedule of some lists of ``(kind, i, j)``, a list for each device.

        Raises:
            TypeError: something in a list is no action.
        """
        return cls(tuple(tuple(map(_action, row)) for row in devices), frozenset(pairs))

    def __iter__(self) -> Iterator[Action]:
        """All actions, device by device."""
        return chain.from_iterable(self.devices)

    @cached_property
    def microbatches(self) -> int:
        """m: one more than the largest micro-batch that is named."""
        return 1 + max((action.i for action in self), default=-1)

    @cached_property
    def partitions(self) -> int:
        """n: one more than the largest partition that is named."""
        return 1 + max((action.j for action in self), default=-1)

    @cached_property
    def placement(self) -> tuple[int, ...]:
        """The device of each partition; -1 for a partition without any action."""
        found = {action.j: device for device, row in enumerate(self.devices) for action in row}
        return tuple(found.get(j, -1) for j in range(self.partitions))

    @cached_property
    def orders(self) -> dict[frozenset[Action], tuple[Action, ...]]:
        """What :func:`gpipe_bench.schedules.merged_order` found, by the pairs that it took together."""
        return {}

    @cached_property
    def splits(self) -> bool:
        """Whether a backward pass is split into I and W."""
        return any(action.kind in "IW" for action in self)

    @cached_property
    def forwards_first(self) -> bool:
        """Whether every device takes all of its forward passes before its first other action.

        Such a schedule can stop between the two: ``pipe(x)`` is its first part, ``loss.backward()`` its second.
        """
        return all("F" not in "".join(action.kind for action in row).lstrip("F") for row in self.devices)


def _action(given: object) -> Action:
    """One action of a list that somebody wrote."""
    if isinstance(given, tuple | list) and len(given) == 3 and all(type(number) is int for number in given[1:]):
        return Action(*given)
    raise TypeError(f"an action must be (kind, micro-batch, partition), got {given!r}; write one as ('F', 0, 1)")


def in_pairs(row: Iterable[_Listed], pairs: Container[object]) -> Iterator[tuple[_Listed, ...]]:
    """What a device does, one by one; the first of a pair comes together with the next one."""
    actions = iter(row)
    for action in actions:
        yield (action, *islice(actions, 1)) if action in pairs else (action,)


@lru_cache(maxsize=2**14)
def needs(action: Action, partitions: int) -> tuple[tuple[Action, ...], ...]:
    """What must have ended before ``action``: of each group in the result, one action."""
    kind, i, j = action
    if kind == "F":
        return ((Action("F", i, j - 1),),) if j else ()
    if kind == "R":
        return ((Action("F", i, j),),)
    if kind == "W":
        return ((Action("I", i, j),),)
    later = ((Action("B", i, j + 1), Action("I", i, j + 1)),) if j < partitions - 1 else ()
    return ((Action("F", i, j),), *later)


def with_recomputation(schedule: Schedule, microbatches: int) -> Schedule:
    """The schedule with R right before each B or I of the leading micro-batches; one that is there already stays.

    R needs nothing from another partition, so the recomputation overlaps the transfer of the gradient (Kim et al.,
    torchgpipe, arXiv 2004.09910, section 3.2.1, which calls it early recomputation). Where it parts the two of a pair,
    they are none in the result.

    Args:
        schedule: any schedule.
        microbatches: how many are checkpointed: m for ``always``, m - 1 for ``except_last``, 0 for ``never``.
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
    kept = (one for row in rows for one, following in pairwise(row) if one in schedule.pairs and following.kind != "R")
    return Schedule.of(rows, kept)
