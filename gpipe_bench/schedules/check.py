"""Prove that a schedule can run, before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import KINDS, Action, MessageEnd, Schedule, needs
from gpipe_bench.schedules.memory import in_flight
from gpipe_bench.schedules.messages import Channel, Message, Skips, channels
from gpipe_bench.schedules.order import merged_order
from gpipe_bench.schedules.timing import Durations, timing

_NAMED = 6


@dataclass(frozen=True, slots=True)
class Facts:
    """What is known of a schedule that can run.

    Attributes:
        schedule: that schedule.
        microbatches: m.
        partitions: n.
        placement: the device of each partition.
        in_flight: for each device the largest number of forward passes whose activations it holds at once.
        order: all actions in one order that keeps the order of every device.
        crossed: for pairs of devices two messages of which the first is taken before the second, but sent after it.
            The second waits at its receiver: a transport must receive in the order of its sender.
    """

    schedule: Schedule
    microbatches: int
    partitions: int
    placement: tuple[int, ...]
    in_flight: tuple[int, ...]
    order: tuple[Action, ...]
    crossed: tuple[tuple[Message, Message], ...]

    def bubble(self, forward: float = 1.0, inputs: float = 1.0, weights: float = 1.0) -> float:
        """The idle share of all devices' time for given T_F, T_B, T_W, with free transfers; from 0 to 1.

        Args:
            forward: T_F, of a forward pass through one partition.
            inputs: T_B, of the backward pass of its inputs.
            weights: T_W, of the backward pass of its weights.
        """
        return timing(self.schedule, Durations(forward, inputs, weights)).bubble


def check(schedule: Schedule | Iterable[Iterable[tuple[str, int, int]]], skips: Skips = ()) -> Facts:
    """Prove that every action occurs once, that what it needs comes before it, and that no device waits for ever.

    Every micro-batch must pass every partition: F once, and then B once, or I and W once. R may recompute a forward
    pass once, before its B or I. From one device to another, activations are taken in the order in which they are sent,
    and so are gradients. Skips lead forward as activations do, so they add nothing to wait for.

    Between processes this holds where each pair of them has a channel for each direction, sends run beside the actions,
    and messages are received in the order in which they are sent. Then a send may last until its receive (a
    rendezvous). A send that holds up the next action, or a channel for both directions, can wait for ever in every
    schedule that has backward passes between forward passes.

    Args:
        schedule: a schedule, or for each device a list of ``(kind, i, j)``.
        skips: for each skip the partition that stashes it, then those that read it, in order.

    Raises:
        ScheduleError: the schedule cannot run; the message names the actions of the first problems.
    """
    if not isinstance(schedule, Schedule):
        schedule = Schedule.of(schedule)
    m, n = schedule.microbatches, schedule.partitions
    wrong = chain(
        _incomplete(schedule), _scattered(schedule), _disordered(schedule), _misplaced(schedule), _misled(skips, n)
    )
    if problems := [*islice(_malformed(schedule), _NAMED)] or [*islice(wrong, _NAMED)]:
        raise ScheduleError(problems)
    order = tuple(merged_order(schedule))
    between = channels(schedule, skips)
    if problems := [*islice(_unordered(between), _NAMED)]:
        raise ScheduleError(problems)
    crossed = tuple(pair for channel in between.values() for pair in _crossed(channel))
    return Facts(schedule, m, n, schedule.placement, in_flight(schedule), order, crossed)


def _malformed(schedule: Schedule) -> Iterator[str]:
    if not any(schedule.devices):
        yield "a schedule must have an action, got none; give each device its list"
    for action in schedule:
        if action.kind not in KINDS:
            yield f"the kind of an action must be one of {', '.join(KINDS)}, got {action}; correct it"
        if not all(type(k) is int and k >= 0 for k in (action.i, action.j)):
            yield f"micro-batch and partition must be integers from 0, got {action}; correct it"


def _incomplete(schedule: Schedule) -> Iterator[str]:
    counts = Counter(schedule)
    for action, count in counts.items():
        if count > 1:
            yield f"every action must occur once, got {count} times {action}; drop {count - 1}"
    m, n = schedule.microbatches, schedule.partitions
    for i in range(m):
        for j in range(n):
            forward, whole, inputs, weights = (Action(kind, i, j) in counts for kind in "FBIW")
            if not forward:
                yield f"every micro-batch must pass every partition, got no F({i},{j}); add it"
            if (whole, inputs, weights) not in ((True, False, False), (False, True, True)):
                got = [str(Action(kind, i, j)) for kind in "BIW" if Action(kind, i, j) in counts]
                rule = f"the backward pass of micro-batch {i} on partition {j} must be B, or I and W"
                yield f"{rule}, got {' and '.join(got) or 'none'}; correct it"


def _scattered(schedule: Schedule) -> Iterator[str]:
    found: dict[int, int] = {}
    for device, row in enumerate(schedule.devices):
        for action in row:
            if found.setdefault(action.j, device) != device:
                place = f"device {found[action.j]} and with {action} on device {device}"
                yield f"a partition must be on one device, got partition {action.j} on {place}; move it"


def _disordered(schedule: Schedule) -> Iterator[str]:
    """Actions that come before what they need on the same device; between devices, the merged order decides."""
    for device, row in enumerate(schedule.devices):
        place = {action: k for k, action in enumerate(row)}
        for action in row:
            kind, i, j = action
            before = {"F": "", "W": "I"}.get(kind, "F")
            first = Action(before, i, j)
            if before and place.get(first, -1) > place[action]:
                yield f"{first} must come before {action}, got it later on device {device}; exchange them"
            later = [place.get(Action(other, i, j), -1) for other in "BI"]
            if kind == "R" and place[action] > max(later):
                yield f"{action} must come before the backward pass that it is for, got it later; move it"


def _misplaced(schedule: Schedule) -> Iterator[str]:
    """Ends of messages that a list with messages lacks or has twice, or has on the wrong side of an action."""
    placement, rows = schedule.placement, schedule.messages
    place = {one: (device, k) for device, row in enumerate(rows) for k, one in enumerate(row)}
    wanted: set[MessageEnd] = set()
    for action in schedule if rows else ():
        # The last group is what comes from another partition, if anything does.
        giver = next((one for some in needs(action, schedule.partitions)[-1:] for one in some if one in place), action)
        if placement[giver.j] == placement[action.j]:
            continue
        received = MessageEnd(False, "F" if action.kind == "F" else "B", action.i, action.j)
        wanted |= {received, received.other}
        for first, second in ((giver, received.other), (received, action)):
            (device, k), (other, later) = place.get(first, (0, 0)), place.get(second, (0, 0))
            if first in place and second in place and (device != other or k > later):
                yield f"{first} must come before {second}, got it later or on another device; move it"
    counts = Counter(one for row in rows for one in row if isinstance(one, MessageEnd))
    for end in sorted(wanted - counts.keys()):
        yield f"a list with messages must have both ends of each, got no {end}; add it, or leave out all SEND and RECV"
    for end, count in counts.items():
        if count > 1 or end not in wanted:
            yield f"a message must be sent and received once, if it leaves its device, got {end}; drop it"


def _unordered(channels: Mapping[tuple[int, int], Channel]) -> Iterator[str]:
    """For each pair of devices the first activation, and the first gradient, that is not taken as it was sent."""
    for (source, target), channel in channels.items():
        for way in "FB":
            sends, takes = (
                [(message, action) for message, action in ends if message.way == way and message.skip is None]
                for ends in (channel.sent, channel.taken)
            )
            for (message, first), (other, taking) in zip(sends, takes, strict=True):
                if message != other:
                    got = f"{first} next on device {source}, and {taking} next on device {target}"
                    yield f"a device must receive in the order in which another one sends, got {got}; exchange actions"
                    break


def _crossed(channel: Channel) -> list[tuple[Message, Message]]:
    """The first message of a channel that is taken before one that was sent earlier, and that one."""
    pairs = zip(channel.taken, channel.sent, strict=True)
    return [*islice(((early, late) for (early, _), (late, _) in pairs if early != late), 1)]


def _misled(skips: Skips, partitions: int) -> Iterator[str]:
    for skip in skips:
        if [*skip] != sorted(skip) or not 0 <= skip[0] <= skip[-1] < partitions:
            got = f"one from {' to '.join(map(str, skip))} of {partitions} partitions"
            yield f"a skip must lead to later partitions, or stay in its own, got {got}; correct it"
