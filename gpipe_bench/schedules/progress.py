"""Prove that lists of messages between processes end, or show where each process is stuck.

    from gpipe_bench.schedules import read_messages, stuck

    for line in stuck(read_messages(text), "pair"):
        print(line)

A process works through its list. It begins a message and goes on; it stops only where it waits for one. A message has
ended once its send and its receive have met: a *rendezvous*. gloo does so for every size, as real processes show in
``tests/distributed/random_lists.py``. What may keep two of them apart is the order of a queue:

    channels     what shares a queue in a process                            who works like this
    gloo         messages from a rank to a rank with a tag                   gloo, and MPI without buffers
    group        all messages                                                NCCL, one communicator
    pair         messages between two ranks, both ways                       NCCL, ``isend`` and ``irecv`` of PyTorch
    direction    messages that go forward; messages that go backward         NCCL, pytorch/pytorch#186173
    edge         messages from a rank to a rank                              NCCL, pytorch/pytorch#196666

Only the first of a queue can meet its counterpart, which must be the first of its own queue. A batch is one entry of a
queue and ends as a whole: all of its messages meet, and the batches that they meet end with it. Counterparts are paired
in order, since NCCL has no tags. So two messages may be mixed up where the lists of two processes differ.

The rules know no durations: what can end does end, in every order of events, so a proof holds for all speeds.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from gpipe_bench.errors import ScheduleError

CHANNELS: Final = ("gloo", "group", "pair", "direction", "edge")
"""Which messages wait for each other; :func:`stuck` takes one of them."""

_SHOWN: Final = 3


class P2P(NamedTuple):
    """One end of a message between two processes."""

    sends: bool
    """Whether this is the send, or else the receive."""
    peer: int
    """Rank of the other process."""
    label: str
    """How the list calls it, as in ``2RECV_F0`` or ``isend 1``."""
    name: str = ""
    """What travels: both ends must have the same name."""
    forward: bool = True
    """Whether it goes forward through the pipeline."""
    tag: int = 0
    """What gloo pairs it by."""


class Begin(NamedTuple):
    """A process begins some messages at once, and goes on: one, or those of a batch."""

    messages: tuple[P2P, ...]


class Wait(NamedTuple):
    """A process does something for which messages must have ended."""

    label: str
    """How the list calls it, as in ``2F0`` or ``wait 3``."""
    messages: tuple[int, ...]
    """Numbers of the messages in the order in which this process begins them, from 0; some may come later."""
    again: bool = False
    """Whether a call waits for a message for which an earlier one has waited: over gloo it never returns."""


Step = Begin | Wait
Lists = Sequence[Sequence[Step]]
"""For each rank what it does, in order."""


@dataclass(slots=True)
class _Rank:
    """Where a process is.

    Attributes:
        steps: those that are left.
        begun: its messages, in order.
        ended: the numbers of those that have ended.
        queues: for each channel its entries; an entry is a batch of messages, by number.
    """

    steps: deque[Step]
    begun: list[P2P] = field(default_factory=list)
    ended: set[int] = field(default_factory=set)
    queues: defaultdict[Hashable, deque[tuple[int, ...]]] = field(default_factory=lambda: defaultdict(deque))

    def missing(self) -> list[int]:
        """What the next step waits for."""
        step = self.steps[0] if self.steps else Wait("", tuple(range(len(self.begun))))
        if isinstance(step, Begin):
            return []
        return [one for one in step.messages if one not in self.ended or step.again]


def stuck(lists: Lists, channels: str, *, batched: bool = False) -> tuple[str, ...]:
    """Where processes wait for ever, and which messages are mixed up; nothing if the lists end.

    Args:
        lists: for each rank what it does.
        channels: one of :data:`CHANNELS`.
        batched: whether messages that follow one another in a list, without anything between them, are one batch.

    Returns:
        A line for each rank that is stuck, then one for each pair of messages that are mixed up.

    Raises:
        ScheduleError: there is no such kind of channels, or a message goes to a rank without a list.
    """
    if channels not in CHANNELS:
        raise ScheduleError([f"channels must be one of {', '.join(CHANNELS)}, got {channels!r}; correct it"])
    _refuse_strangers(lists)
    ranks = [_Rank(deque(_batches(steps) if batched else steps)) for steps in _under(lists, channels)]
    mixed: list[str] = []
    moved = True
    while moved:
        advanced = [_advance(rank, number, channels) for number, rank in enumerate(ranks)]
        moved = any(advanced)
        for number, key, meetings in [*_meeting(ranks)]:
            moved = True
            ranks[number].ended.update(ranks[number].queues[key].popleft())
            mixed += [*_mixed(ranks, number, meetings)]
    waiting = (_told(ranks, number) for number, rank in enumerate(ranks) if rank.steps or rank.missing())
    return (*waiting, *mixed)


def assumptions(channels: str, *, batched: bool = False) -> str:
    """Under which rules :func:`stuck` has proven that lists end."""
    queue = {
        "gloo": "messages of one tag from a rank to a rank are paired in order, and none holds up another;"
        " no call waits twice for a message",
        "group": "all messages of a rank share one queue",
        "pair": "all messages between two ranks share one queue, both ways",
        "direction": "all forward messages of a rank share one queue, and all backward ones another",
        "edge": "all messages from a rank to a rank share one queue",
    }[channels]
    batches = "" if channels == "gloo" else "; a batch ends as a whole"
    return f"a send ends with its receive; {queue}{batches}{'; messages in a row are one batch' if batched else ''}"


def _under(lists: Lists, channels: str) -> Lists:
    """The lists, where only gloo minds a second wait for a message."""
    if channels == "gloo":
        return lists
    return [[step._replace(again=False) if isinstance(step, Wait) else step for step in steps] for steps in lists]


def _refuse_strangers(lists: Lists) -> None:
    wrong = [
        f"a message must go between two ranks with lists, got {message.label} of rank {rank} with rank {message.peer}"
        f" of {len(lists)}; add the list of that rank, or correct the message"
        for rank, steps in enumerate(lists)
        for step in steps
        if isinstance(step, Begin)
        for message in step.messages
        if message.peer == rank or not 0 <= message.peer < len(lists)
    ]
    if wrong:
        raise ScheduleError(wrong[:_SHOWN])


def _batches(steps: Sequence[Step]) -> Iterator[Step]:
    """The steps, where messages in a row are one batch."""
    row: tuple[P2P, ...] = ()
    for step in steps:
        if isinstance(step, Begin):
            row += step.messages
            continue
        if row:
            yield Begin(row)
        row = ()
        yield step
    if row:
        yield Begin(row)


def _advance(rank: _Rank, number: int, channels: str) -> bool:
    """Let a process go on until it waits; says whether it did."""
    before = len(rank.steps)
    while rank.steps and not rank.missing():
        step = rank.steps.popleft()
        if isinstance(step, Begin):
            entries: defaultdict[Hashable, list[int]] = defaultdict(list)
            for message in step.messages:
                entries[_channel(message, number, channels)].append(len(rank.begun))
                rank.begun.append(message)
            for key, entry in entries.items():
                rank.queues[key] += [(one,) for one in entry] if channels == "gloo" else [tuple(entry)]
    return len(rank.steps) < before


def _channel(message: P2P, rank: int, channels: str) -> Hashable:
    source, target = (rank, message.peer) if message.sends else (message.peer, rank)
    keys: dict[str, Hashable] = {
        "gloo": (source, target, message.tag),
        "group": (),
        "pair": frozenset((source, target)),
        "direction": message.forward,
        "edge": (source, target),
    }
    return keys[channels]


_Meeting = list[tuple[int, int, int]]
"""For each message of an entry: its number, the other rank, and the number there."""


def _meeting(ranks: Sequence[_Rank]) -> Iterator[tuple[int, Hashable, _Meeting]]:
    """The first entries of queues that can end: the largest set in which every message meets one of the set."""
    firsts = {(number, key): row[0] for number, rank in enumerate(ranks) for key, row in rank.queues.items() if row}
    while True:
        met = {place: _counterparts(ranks, firsts, place) for place in firsts}
        alone = [place for place, found in met.items() if len(found) < len(firsts[place])]
        if not alone:
            yield from ((number, key, found) for (number, key), found in met.items())
            return
        for place in alone:
            del firsts[place]


def _counterparts(
    ranks: Sequence[_Rank], firsts: dict[tuple[int, Hashable], tuple[int, ...]], place: tuple[int, Hashable]
) -> _Meeting:
    number, key = place
    found: _Meeting = []
    taken: defaultdict[tuple[bool, int], int] = defaultdict(int)
    for one in firsts[place]:
        message = ranks[number].begun[one]
        others = ranks[message.peer].begun
        fits = [
            other
            for other in firsts.get((message.peer, key), ())
            if others[other].peer == number and others[other].sends != message.sends
        ]
        position = taken[message.sends, message.peer]
        taken[message.sends, message.peer] += 1
        found += [(one, message.peer, other) for other in fits[position : position + 1]]
    return found


def _mixed(ranks: Sequence[_Rank], number: int, meetings: _Meeting) -> Iterator[str]:
    """Receives of a rank that get another message than they are for."""
    for one, peer, other in meetings:
        here, there = ranks[number].begun[one], ranks[peer].begun[other]
        if not here.sends and here.name != there.name:
            yield f"rank {number}: {here.label} gets the message of {there.label} of rank {peer}"


def _told(ranks: Sequence[_Rank], number: int) -> str:
    """Where a rank is stuck, and what the first messages of its queues wait for."""
    rank = ranks[number]
    missing = rank.missing()
    known = [rank.begun[one].label for one in missing if one < len(rank.begun)]
    later = len(missing) - len(known)
    what = [*dict.fromkeys(known)][:_SHOWN] + ["a message that it begins only later"] * bool(later)
    step = rank.steps[0] if rank.steps else None
    place = step.label if isinstance(step, Wait) else "the end of its list"
    before = ", for which it has waited before" * (isinstance(step, Wait) and step.again)
    firsts = [rank.begun[one] for row in rank.queues.values() if row for one in row[0]]
    heads = ", ".join(f"{first.label} (with rank {first.peer})" for first in firsts[:_SHOWN])
    more = f" and {len(firsts) - _SHOWN} more" if len(firsts) > _SHOWN else ""
    return f"rank {number} is stuck at {place}: waits for {', '.join(what)}{before}" + (
        f"; next in its queues: {heads}{more}" if heads else ""
    )
