"""Tables in the terminal that lose no column and no digit, however narrow the terminal is.

as wide as it is          too wide: parts below each other, each with the key columns
key  a  b  c  d           key  a  b
x    1  2  3  4           x    1  2

key  c  d
x    3  4
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_UNLIMITED: Final = 10_000
_GAP: Final = 2


def output() -> Console:
    """Standard output: as wide as the terminal or as COLUMNS says; a pipe and a file have no limit."""
    console = Console(highlight=False)
    limited = console.is_terminal or os.environ.get("COLUMNS", "").isdecimal()
    return console if limited else Console(highlight=False, width=_UNLIMITED)


def counted(number: int | None, noun: str) -> str:
    """A number of things, such as ``1 device`` and ``2 devices``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def command_lines(label: str, words: Sequence[str], *options: tuple[str, str], width: int) -> str:
    """A command behind a label, on several lines where it is wider than ``width``; the shell joins such lines.

    One option is never cut, however long it is.
    """
    lines = [label + shlex.join(words)]
    for option in map(shlex.join, options):
        if cell_len(f"{lines[-1]} {option} \\") <= width:
            lines[-1] += f" {option}"
        else:
            lines.append(" " * 2 * _GAP + option)
    return " \\\n".join(lines)


def short_path(path: Path) -> str:
    """A path from the current folder where it lies in that, as a person would type it."""
    place = path.absolute()
    return str(place.relative_to(Path.cwd()) if place.is_relative_to(Path.cwd()) else path)


@dataclass(frozen=True, slots=True)
class Column:
    """One column.

    Attributes:
        name: its heading; may have several lines.
        text: whether it holds text, which is on the left and may be folded; numbers are on the right and never are.
        starts_part: whether a part begins with it, where there are parts.
    """

    name: str
    text: bool = False
    starts_part: bool = False


@dataclass(slots=True)
class Grid:
    """A table that is printed in parts where it is wider than the terminal.

    Attributes:
        columns: all columns. One without any content is left out, unless it is a key.
        title: text above it.
        keys: how many of the first columns stand in every part.
        rows: the words of each row, and the style of it.
    """

    columns: Sequence[Column]
    title: str = ""
    keys: int = 1
    rows: list[tuple[Sequence[str], str]] = field(default_factory=list)

    def add(self, *words: str, style: str = "") -> None:
        """Add a row of plain words, one per column."""
        self.rows.append((words, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The title, then the parts."""
        if self.title:
            yield Text(self.title, style="bold")
        parts = self._parts(options.max_width) if self.rows else []
        for number, part in enumerate(parts):
            if number:
                yield Text()
            yield self._table(part)

    def _parts(self, width: int) -> list[list[int]]:
        """The columns of each part: the keys, and as many others as fit beside them, at least one."""
        keys = list(range(self.keys))
        others = [k for k in range(self.keys, len(self.columns)) if any(words[k] for words, _ in self.rows)]
        if self._width([*keys, *others], width) <= width:
            return [[*keys, *others]]
        parts = [keys[:]]
        for place in others:
            full = self.columns[place].starts_part or self._width([*parts[-1], place], width // 2) > width
            if full and len(parts[-1]) > len(keys):
                parts.append(keys[:])
            parts[-1].append(place)
        return parts

    def _width(self, places: Sequence[int], most: int) -> int:
        """The width of a part whose keys are folded where they are wider than ``most`` together."""
        keys, others = places[: self.keys], places[self.keys :]
        return min(most, self._sum(keys)) + self._sum(others) + _GAP * bool(others)

    def _sum(self, places: Sequence[int]) -> int:
        return sum(self._widest(place) + _GAP for place in places) - _GAP

    def _widest(self, place: int) -> int:
        words = [*self.columns[place].name.split("\n"), *(words[place] for words, _ in self.rows)]
        return max(map(cell_len, words))

    def _table(self, part: Sequence[int]) -> Table:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for place in part:
            column = self.columns[place]
            table.add_column(
                Text(column.name),
                justify="left" if column.text else "right",
                no_wrap=not column.text,
                overflow="fold",
            )
        for words, style in self.rows:
            table.add_row(*(Text(words[place]) for place in part), style=style)
        return table
