"""Schedules as CSV, in the form of PyTorch's pipelining (``torch.distributed.pipelining``).

A line for each device, an action in each field: stage, kind, micro-batch, such as ``0F3``. A field may be empty.

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

``(0F7;7B3)OVERLAP_F_B`` is a pair: a forward and a backward pass that are meant to overlap. PyTorch's kinds of compute
actions are F, B, I and W. It has no recomputation, and no R. PyTorch adds messages, such as ``0SEND_F3`` and
``1RECV_F3``: a list may have all of them, or leave them to a runtime. What PyTorch adds for sharded parameters, such as
``0UNSHARD``, is passed over.
"""

from __future__ import annotations

import csv
import re
from dataclasses import replace
from io import StringIO
from typing import Final

from gpipe_bench.errors import ScheduleError
from gpipe_bench.schedules.actions import Action, MessageEnd, Schedule, in_pairs

_FIELD: Final = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})")
_MESSAGE: Final = re.compile(r"(\d{1,9})(SEND|RECV)_([FB])(\d{1,9})")
_SHARDED: Final = re.compile(r"\d{1,9}(UNSHARD|RESHARD|REDUCE_GRAD)\d{0,9}")
_PAIR: Final = re.compile(r"\((.*);(.*)\)OVERLAP_F_B")
_NAMED: Final = 5


def read_csv(text: str) -> Schedule:
    """The schedule that ``text`` holds; :func:`gpipe_bench.schedules.check` says whether it can run.

    Args:
        text: a line for each device. A byte order mark before the first and empty lines after the last are no part.

    Raises:
        ScheduleError: some fields are no actions, or a line has none; the first ones are named.
    """
    rows: list[list[Action]] = []
    messages: list[list[Action | MessageEnd]] = []
    pairs: list[Action] = []
    problems: list[str] = []
    for line, fields in enumerate(csv.reader(StringIO(text.removeprefix("\ufeff").rstrip())), 1):
        rows.append([])
        messages.append([])
        for field in filter(None, map(str.strip, fields)):
            if _SHARDED.fullmatch(field):
                continue
            actions = actions_of(field)
            if end := _MESSAGE.fullmatch(field):
                messages[-1].append(MessageEnd(end[2] == "SEND", end[3], int(end[4]), int(end[1])))
            elif actions is not None:
                rows[-1] += actions
                messages[-1] += actions
                pairs += actions[:-1]
            else:
                rule = "a field must be a stage, one of F, B, I, W, and a micro-batch, such as 0F3"
                problems.append(f"{rule}, got {field[:40]!r} in line {line}; correct it")
        if not rows[-1] and not problems:
            problems.append(f"a line must have the actions of a device, got none in line {line}; remove it")
    if not any(rows) and not problems:
        problems.append("a schedule must have an action, got none; write a line for each device")
    if problems:
        raise ScheduleError(problems[:_NAMED])
    if messages == rows:
        messages = []
    return replace(Schedule.of(rows, pairs), messages=tuple(map(tuple, messages)))


def actions_of(field: str) -> list[Action] | None:
    """The action of a field, or the two of a pair; None if the field is no action."""
    pair = _PAIR.fullmatch(field)
    found = [_FIELD.fullmatch(part.strip()) for part in (pair.groups() if pair else [field])]
    actions = [Action(one[2], int(one[3]), int(one[1])) for one in found if one]
    return actions if len(actions) == len(found) else None


def to_csv(schedule: Schedule) -> str:
    """The schedule as text that :func:`read_csv` and PyTorch read, with its messages if it has them.

    Raises:
        ScheduleError: it has R, which PyTorch has not.
    """
    recomputed = [action for action in schedule if action.kind == "R"]
    if recomputed:
        raise ScheduleError(
            [f"a schedule for PyTorch must have no R, got {recomputed[0]}; write it before it gets checkpoints"]
        )
    rows = (map(_field, in_pairs(row, schedule.pairs)) for row in schedule.messages or schedule.devices)
    return "".join(",".join(row) + "\n" for row in rows)


def _field(actions: tuple[Action | MessageEnd, ...]) -> str:
    names = [f"{one.j}{one.kind}{one.i}" if isinstance(one, Action) else str(one) for one in actions]
    return f"({';'.join(names)})OVERLAP_F_B" if len(names) == 2 else names[0]
