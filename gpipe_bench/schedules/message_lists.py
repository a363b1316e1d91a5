"""Lists of messages from files, and those that follow from a schedule.

Three forms of a file, each with a line for each rank and a comma between fields:

    0F0,0SEND_F0,2RECV_F0,2F0       what PyTorch makes of a schedule: stage, action, micro-batch
    0F0,1F0,0B0                     a schedule: its messages are those that this project's runtime would send
    isend 1 tag 5,recv 1,wait 0     calls of ``torch.distributed``, as :func:`gpipe_bench.distributed.recorded` writes

Calls are ``send``, ``recv``, ``isend`` and ``irecv`` with the rank of the other process, and where they have it
``tag N`` and ``name WORD``, what travels. ``batch(isend 1; irecv 1)`` is a call of ``batch_isend_irecv``. ``wait 0``
waits for the first message that this rank began, ``wait`` alone for all so far for which nothing has waited. A line may
be empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import Schedule
from gpipe_bench.schedules.messages import Message, Skips, channels, sent, taken
from gpipe_bench.schedules.progress import P2P, Begin, Step, Wait
from gpipe_bench.schedules.torch_csv import actions_of, read_csv, to_csv

_LOWERED: Final = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})")
_COLLECTIVE: Final = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}")
_CALL: Final = re.compile(r"(i?)(send|recv) (\d{1,9})(?: tag (\d{1,9}))?(?: name (\S+))?")
_BATCH: Final = re.compile(r"batch\((.*)\)")
_WAIT: Final = re.compile(r"wait(?: (\d{1,9}))?")
_NAMED: Final = 5


def read_messages(text: str, skips: Skips = (), *, blocking: bool = False) -> list[list[Step]]:
    """The lists of a file, in one of the three forms.

    Args:
        text: the file.
        skips: those of the model, for a schedule without messages; see :func:`gpipe_bench.schedules.check`.
        blocking: whether each SEND and RECV of PyTorch's form holds its process until it has ended. PyTorch's runtime
            waits for a receive at the action that needs it, and for sends at the end.

    Raises:
        ScheduleError: some fields have none of the forms; the first ones are named.
    """
    rows = [
        [field.strip() for field in line.split(",") if field.strip()]
        for line in text.removeprefix("\ufeff").splitlines()
    ]
    fields = [field for row in rows for field in row]
    if any(_calls(field) is not None or _WAIT.fullmatch(field) for field in fields):
        return _called(rows)
    if any(_LOWERED.fullmatch(field) for field in fields):
        return _lowered(rows, blocking=blocking)
    return derived(read_csv(text), skips)


def derived(schedule: Schedule, skips: Skips = ()) -> list[list[Step]]:
    """What the runtime of :class:`gpipe_bench.distributed.Pipe` sends and receives for a schedule without messages.

    It begins a send when its action has ended, and does not wait for it. Before an action it receives what the sender
    has sent until then, one message after the other. Of a schedule with messages, those are what there is.
    """
    if schedule.messages:
        return _lowered([line.split(",") for line in to_csv(schedule).splitlines()], blocking=False)
    placement = schedule.placement
    between = channels(schedule, skips)
    lists: list[list[Step]] = []
    for rank, row in enumerate(schedule.devices):
        steps: list[Step] = []
        incoming = {source: [m for m, _ in one.sent] for (source, target), one in between.items() if target == rank}
        numbers: dict[Message, int] = {}
        count = 0
        for action in row:
            for message in taken(action, placement, skips):
                source = next((source for source, coming in incoming.items() if message in coming), rank)
                while source != rank and message not in numbers:
                    following = incoming[source][sum(one in numbers for one in incoming[source])]
                    numbers[following] = count
                    steps += [Begin((_end(following, source, sends=False),)), Wait(str(action), (count,))]
                    count += 1
            steps.append(Wait(str(action), ()))
            for message in sent(action, placement, skips):
                if placement[message.j] != rank:
                    steps.append(Begin((_end(message, placement[message.j], sends=True),)))
                    count += 1
        lists.append(steps)
    return lists


def _end(message: Message, peer: int, *, sends: bool) -> P2P:
    return P2P(sends, peer, f"{'send' if sends else 'receive'} of {message}", str(message), message.way == "F")


def _lowered(rows: Sequence[Sequence[str]], *, blocking: bool) -> list[list[Step]]:
    """The form of PyTorch: SEND and RECV are begun where they stand, an action waits for its own RECV."""
    home: dict[int, int] = {}
    for rank, row in enumerate(rows):
        for field in row:
            found = _LOWERED.fullmatch(field)
            stages = [int(found[1])] if found else [action.j for action in actions_of(field) or ()]
            home.update(dict.fromkeys(stages, rank))
    problems: list[str] = []
    lists: list[list[Step]] = []
    for rank, row in enumerate(rows):
        steps: list[Step] = []
        received = _received(row, home)
        count = 0
        for field in row:
            if found := _LOWERED.fullmatch(field):
                message = _message(found, home)
                if message is None:
                    problems.append(f"the other end of {field} must be on a rank, got none in this file; add its line")
                elif message.peer != rank:
                    steps.append(Begin((message,)))
                    steps += [Wait(field, (count,))] * blocking
                    count += 1
            elif (actions := actions_of(field)) is not None:
                needs = (received.get((a.j, "F" if a.kind == "F" else "B", a.i)) for a in actions if a.kind != "W")
                steps.append(Wait(field, tuple(one for one in needs if one is not None)))
            elif not _COLLECTIVE.fullmatch(field):
                rule = "a field must be an action such as 0F3, 0SEND_F3 or 0UNSHARD"
                problems.append(f"{rule}, got {field[:40]!r} in the line of rank {rank}; correct it")
        lists.append(steps)
    if problems:
        raise ScheduleError(problems[:_NAMED])
    return lists


def _message(found: re.Match[str], home: dict[int, int]) -> P2P | None:
    """One end of a message in PyTorch's form; None if the other stage is nowhere."""
    stage, sends, way, i = int(found[1]), found[2] == "SEND", found[3], int(found[4])
    step = 1 if way == "F" else -1
    source, target = (stage, stage + step) if sends else (stage - step, stage)
    peer = home.get(target if sends else source)
    return None if peer is None else P2P(sends, peer, found[0], f"{way}{i} to {target}", way == "F")


def _received(row: Sequence[str], home: dict[int, int]) -> dict[tuple[int, str, int], int]:
    """For each RECV of a rank the number of its message."""
    numbers: dict[tuple[int, str, int], int] = {}
    count = 0
    for found in filter(None, map(_LOWERED.fullmatch, row)):
        message = _message(found, home)
        if message is not None and message.peer != home[int(found[1])]:
            if not message.sends:
                numbers[int(found[1]), found[3], int(found[4])] = count
            count += 1
    return numbers


def _called(rows: Sequence[Sequence[str]]) -> list[list[Step]]:
    """The form of calls."""
    problems: list[str] = []
    lists: list[list[Step]] = []
    for rank, row in enumerate(rows):
        steps: list[Step] = []
        count = 0
        waited: set[int] = set()
        for field in row:
            if waits := _WAIT.fullmatch(field):
                numbers = [int(waits[1])] if waits[1] else [one for one in range(count) if one not in waited]
                steps.append(Wait(field, (*numbers,), again=not waited.isdisjoint(numbers)))
                waited.update(numbers)
            elif calls := _calls(field):
                steps.append(Begin(tuple(message for message, _ in calls)))
                blocks = tuple(count + k for k, (_, waits_itself) in enumerate(calls) if waits_itself)
                steps += [Wait(field, blocks)] * bool(blocks)
                count += len(calls)
            else:
                rule = "a field must be a call such as isend 1, recv 0 tag 5, batch(isend 1; irecv 1) or wait 0"
                problems.append(f"{rule}, got {field[:40]!r} in the line of rank {rank}; correct it")
        lists.append(steps)
    if problems:
        raise ScheduleError(problems[:_NAMED])
    return lists


def _calls(field: str) -> list[tuple[P2P, bool]] | None:
    """The messages of a field, each with whether its call waits for it; None if the field is no call."""
    batch = _BATCH.fullmatch(field)
    found = [_CALL.fullmatch(part.strip()) for part in (batch[1].split(";") if batch else [field])]
    return [*_each(filter(None, found))] if all(found) else None


def _each(found: Iterator[re.Match[str]]) -> Iterator[tuple[P2P, bool]]:
    for call in found:
        tag = int(call[4] or 0)
        yield P2P(call[2] == "send", int(call[3]), call[0], call[5] or f"tag {tag}", tag=tag), not call[1]
