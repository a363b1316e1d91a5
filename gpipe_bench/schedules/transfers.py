"""Sends and receives, derived from the actions of a schedule.

A tensor that another device needs is sent right after the action that makes it, and received there at the same place of
the merged order. All devices then take their transfers in parts of one common order, so a send that waits for its
receive (a rendezvous) cannot block: the first transfer of that order that has not happened yet is next on both sides.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import Action, Schedule

__all__ = ["Transfer", "meet", "with_transfers"]


class Transfer(NamedTuple):
    """One side of a transfer between two devices.

    Attributes:
        kind: ``send`` or ``receive``.
        of: the action whose result it is: F for activations, B or I for gradients.
        peer: the device on the other side.
    """

    kind: str
    of: Action
    peer: int

    def __str__(self) -> str:
        return f"{self.kind} {self.of} {'to' if self.kind == 'send' else 'from'} device {self.peer}"


def with_transfers(schedule: Schedule, order: Iterable[Action]) -> list[list[Action | Transfer]]:
    """For each device its actions with the transfers between them.

    Args:
        schedule: any schedule.
        order: all of its actions in one order, see :func:`gpipe_bench.schedules.order.merged_order`.
    """
    homes, n = schedule.placement, schedule.partitions
    rows: list[list[Action | Transfer]] = [[] for _ in schedule.devices]
    for action in order:
        source = homes[action.j]
        rows[source].append(action)
        other = action.j + {"F": 1, "B": -1, "I": -1}.get(action.kind, n)
        if 0 <= other < n and homes[other] != source:
            rows[source].append(Transfer("send", action, homes[other]))
            rows[homes[other]].append(Transfer("receive", action, source))
    return rows


def meet(rows: Iterable[Sequence[Action | Transfer]]) -> None:
    """Run the lists with every transfer a rendezvous: it happens when both devices have come to it.

    Raises:
        ScheduleError: some devices wait for each other for ever; the message names the transfers.
    """
    waiting = [deque(row) for row in rows]
    while any(waiting):
        moved = False
        for device, row in enumerate(waiting):
            while row and _passes(row[0], device, waiting):
                row.popleft()
                moved = True
        if not moved:
            stuck = [f"device {device} at {row[0]}" for device, row in enumerate(waiting) if row]
            raise ScheduleError([f"transfers must meet, got a deadlock: {'; '.join(stuck)}; order them alike"])


def _passes(step: Action | Transfer, device: int, waiting: Sequence[deque[Action | Transfer]]) -> bool:
    """Whether a device can go past ``step``; a transfer that both have come to is taken from the peer's list, too."""
    if isinstance(step, Action):
        return True
    peer = waiting[step.peer]
    other = Transfer("receive" if step.kind == "send" else "send", step.of, device)
    if not peer or peer[0] != other:
        return False
    peer.popleft()
    return True
