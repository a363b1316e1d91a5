"""Tables of the report: what a field is, and a CSV file as it is."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.text import significant

__all__ = ["Field", "PageTable", "number_words", "plain_table"]

_LINES_AT_MOST: Final = 2000
_SHORT: Final = 8
_SMALL: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a table: what is shown, and the number that it is sorted by; None for text."""

    text: str
    number: float | None = None


@dataclass(slots=True)
class PageTable:
    """A table as the page shows it.

    Attributes:
        title: shown above it.
        evidence: of all of its lines; empty where they differ or have none.
        header: names of the columns.
        lines: a field per column in each.
        note: what is missing.
        notes: what footnotes say.
    """

    title: str
    evidence: str
    header: list[str]
    lines: list[list[Field]]
    note: str = ""
    notes: list[str] = field(default_factory=list)


def plain_table(path: Path) -> PageTable:
    """A CSV file line by line; of a long one the beginning, and the table says so.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            records = list(csv.reader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError([f"table must be a readable CSV file, got {path} ({error}); make it anew"]) from error
    header, lines = (records[0], records[1:]) if records else ([], [])
    kinds = {line[header.index("evidence")] for line in lines} if "evidence" in header else set()
    note = f"The first {_LINES_AT_MOST} of {len(lines)} lines." if len(lines) > _LINES_AT_MOST else ""
    note = note or ("" if lines else "No line: nothing was run, or nothing gave a value.")
    shown = [[_plain(text) for text in line] for line in lines[:_LINES_AT_MOST]]
    return PageTable(path.stem.replace("_", " "), kinds.pop() if len(kinds) == 1 else "", header, shown, note)


def number_words(value: float) -> str:
    """A number with three digits that count; very small ones with an exponent."""
    return significant(value) if abs(value) >= _SMALL or value == 0 else f"{value:.2e}"


def _plain(text: str) -> Field:
    try:
        value = float(text)
    except ValueError:
        return Field(text)
    return Field(text if len(text) <= _SHORT or value.is_integer() else number_words(value), value)
