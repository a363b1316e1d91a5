"""Rows and timeline events read back from CSV, with every problem of a file named at once.

Columns that a figure does not need may be absent, and columns that are not known are passed over, so that a figure can
be redrawn from tables older or newer than the code.
"""

from __future__ import annotations

import csv
import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, TypeVar

from gpipe_bench.errors import ConfigError
from gpipe_bench.peer_rows import PeerRow
from gpipe_bench.rows import EVIDENCE, Record, Row
from gpipe_bench.timeline import KINDS, TimelineEvent

__all__ = ["RecordedEvent", "is_race", "nearest", "read_events", "read_peers", "read_rows"]

_SHOWN_PROBLEMS: Final = 5
_EVENT_KEYS: Final = ("cell", "variant", "repeat", "evidence")
_STREAMS: Final = ("compute", "copy")
_TRUTH: Final = {"true": True, "false": False, "1": True, "0": False}

_PEER_KEYS: Final = ("evidence", "workload", "contender", "model", "variant", "partitions", "chunks", "checkpoint")

T = TypeVar("T")
R = TypeVar("R", bound=Record)


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A timeline event and the run that it belongs to."""

    cell: str
    variant: str
    repeat: int
    evidence: str
    event: TimelineEvent


def read_rows(path: Path, needed: Sequence[str]) -> list[Row]:
    """The rows of a result table.

    Args:
        path: a CSV file.
        needed: columns that must be there.

    Raises:
        ConfigError: the file is absent, empty or has no such columns, or some values do not fit the schema.
    """
    return _read(path, needed, _parser(Row))


def read_peers(path: Path) -> list[PeerRow]:
    """The rows of a table of the race of peers.

    Raises:
        ConfigError: as :func:`read_rows`.
    """
    return _read(path, (*_PEER_KEYS, "status", "throughput_samples_per_s", "host_time_per_cell_us"), _parser(PeerRow))


def is_race(path: Path) -> bool:
    """Whether a table is one of the race of peers: most of its columns are those of other rows, contenders are not."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            header = next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return False
    return {"contender", "workload"} <= set(header)


def _parser(kind: type[R]) -> Callable[[dict[str, str]], R]:
    """What reads a line of a table of rows of this kind."""
    types = {column.name: str(column.type) for column in fields(kind)}

    def parse(record: dict[str, str]) -> R:
        known = {name: _parse(name, types[name], text) for name, text in record.items() if name in types}
        return kind(**{name: value for name, value in known.items() if value is not None})

    return parse


def read_events(path: Path) -> list[RecordedEvent]:
    """The events of a timeline table.

    Raises:
        ConfigError: the file is absent, empty or lacks a column, or some values do not fit.
    """
    return _read(path, (*_EVENT_KEYS, *TimelineEvent.columns()), _parse_event)


def nearest(name: str, known: Iterable[str]) -> str:
    """What to write instead of ``name``: the nearest known one, or all of them."""
    choices = list(dict.fromkeys(known))
    close = difflib.get_close_matches(name, choices, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"use one of {', '.join(choices)}"


def _read(path: Path, needed: Sequence[str], parse: Callable[[dict[str, str]], T]) -> list[T]:
    names, records = _load(path)
    problems = [
        f"columns of {path} must include {name!r}, got none of that name; {nearest(name, names)}"
        for name in needed
        if name not in names
    ]
    if problems:
        raise ConfigError(problems)
    parsed: list[T] = []
    for line, record in enumerate(records, start=2):
        try:
            parsed.append(parse(record))
        except ValueError as error:
            problems.append(f"{path}, line {line}: {error}")
    if len(problems) > _SHOWN_PROBLEMS:
        problems[_SHOWN_PROBLEMS:] = [f"and {len(problems) - _SHOWN_PROBLEMS} more lines like these"]
    if problems:
        raise ConfigError(problems)
    return parsed


def _load(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, restval="")
            records = [{name: text for name, text in record.items() if name is not None} for record in reader]
            names = list(reader.fieldnames or ())
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(
            [f"table must be a readable CSV file, got {path} ({error}); collect the results first"]
        ) from error
    if not records:
        found = "a header alone" if names else "an empty file"
        raise ConfigError([f"table must have at least one row, got {found} at {path}; run and collect it first"])
    return names, records


def _parse(name: str, kind: str, text: str) -> Any:
    """The value of one field; None where the table has none."""
    text = text.strip()
    if kind == "str":
        return text
    if not text:
        return None
    try:
        return _TRUTH[text.lower()] if kind.startswith("bool") else _number(kind, text)
    except (KeyError, ValueError):
        rule = kind.removesuffix(" | None")
        raise ValueError(f"{name} must be of type {rule}, got {text!r}; write a value of that type") from None


def _number(kind: str, text: str) -> int | float | None:
    value = float(text)
    if kind.startswith("float"):
        return None if math.isnan(value) else value
    # A table that pandas wrote has 4.0 for 4 wherever its column has gaps.
    if not value.is_integer():
        raise ValueError(text)
    return int(value)


def _parse_event(record: dict[str, str]) -> RecordedEvent:
    types = {"repeat": "int"} | {column.name: str(column.type) for column in fields(TimelineEvent)}
    names = (*_EVENT_KEYS, *TimelineEvent.columns())
    values = {name: _parse(name, types.get(name, "str"), record[name]) for name in names}
    gaps = [name for name, value in values.items() if value is None]
    if gaps:
        raise ValueError(f"{gaps[0]} must be given, got nothing; fill it in")
    for name, allowed in (("kind", KINDS), ("stream", _STREAMS), ("evidence", EVIDENCE)):
        if values[name] not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {values[name]!r}; use one of them")
    if values["end_us"] < values["start_us"]:
        span = f"{values['start_us']} to {values['end_us']}"
        raise ValueError(f"end_us must not be earlier than start_us, got {span}; record the step again")
    key = {name: values.pop(name) for name in _EVENT_KEYS}
    return RecordedEvent(**key, event=TimelineEvent(**values))
