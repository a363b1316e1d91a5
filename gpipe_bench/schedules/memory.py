"""What a device holds of its micro-batches' activations: arithmetic, in units of one pass through one partition.

    F   adds the activations of its pass; where it is checkpointed, it leaves ``boundary`` of them: its input
    R   adds what the checkpoint left out
    I   leaves ``kept`` of them, which W needs
    B   frees all of them, and so does W with what I left

Engine, emulator and simulator know the memory of tensors. This is for the choice of a schedule before there are any.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import KINDS, Schedule


@dataclass(frozen=True, slots=True)
class Held:
    """What a device holds at one of its actions, in activations of a pass through one partition.

    Attributes:
        during: while the action runs.
        after: when it has ended.
    """

    during: float
    after: float


def change(kind: str, kept: float = 1.0, stored: float = 1.0) -> float:
    """By how much an action changes what its device holds, in activations of a pass through one partition.

    Args:
        kind: F, R, B, I or W.
        kept: the share of the activations that W needs after I.
        stored: the share that F leaves: 1, or what a checkpoint keeps.
    """
    return {"F": stored, "R": 1.0 - stored, "B": -1.0, "I": kept - 1.0, "W": -kept}[kind]


def memory(schedule: Schedule, kept: float = 1.0, boundary: float = 0.0) -> tuple[tuple[Held, ...], ...]:
    """For each device what it holds at each of its actions, in order.

    Zero Bubble (arXiv 2401.10241, section 4.2) has a limit of memory, and its printed bubbles come out with ``kept`` of
    one half. With ``kept`` of 1 and without R the largest value of a device is that of :func:`in_flight`.

    Args:
        schedule: any schedule; a pass that has an R is checkpointed.
        kept: the share of the activations that W needs after I, from 0 to 1.
        boundary: the share that a checkpoint keeps, from 0 to 1.

    Raises:
        ScheduleError: a share is not from 0 to 1.
    """
    for name, share in (("kept", kept), ("boundary", boundary)):
        if not 0 <= share <= 1:
            raise ScheduleError([f"{name} must be a share from 0 to 1, got {share}; correct it"])
    checkpointed = {action[1:] for action in schedule if action.kind == "R"}
    changes = {stored: {kind: change(kind, kept, stored) for kind in KINDS} for stored in (1.0, boundary)}
    found = []
    for row in schedule.devices:
        held, own = 0.0, []
        for action in row:
            by = changes[boundary if action[1:] in checkpointed else 1.0][action.kind]
            during = held + (1.0 if action.kind == "F" else max(by, 0.0))
            held += by
            own.append(Held(during, held))
        found.append(tuple(own))
    return tuple(found)


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """For each device the largest number of passes whose activations it holds at once.

    A forward pass (of one micro-batch through one partition) holds its activations until its B, or its W, has ended. It
    counts as one from I to W, too, where only what W needs is left. Checkpoints do not count.
    """
    peaks = []
    for row in schedule.devices:
        held = peak = 0.0
        for action in row:
            held += change(action.kind)
            peak = max(peak, held)
        peaks.append(int(peak))
    return tuple(peaks)
