"""Tables of the report: what a field is, a CSV file as tables, and how a wide table becomes one that can be read.

What every line says alike stands above the table, once; what names a line stays in view when the rest is scrolled.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpipe_bench.figures.text import significant
from gpipe_bench.results.tables import read_text

if TYPE_CHECKING:
    import pandas as pd

_LINES_AT_MOST: Final = 2000
_SMALL: Final = 1e-3
_LONG: Final = 40
_SPLIT: Final = "model"
_VERDICT: Final = "verdict"
_FINE: Final = "ok"
_SAID: Final = ("evidence", _SPLIT)  # of a table in its heading


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a table.

    Attributes:
        text: what is shown.
        number: what it is sorted by; None for text.
        more: said of it when the pointer rests on it.
    """

    text: str
    number: float | None = None
    more: str = ""

    @property
    def hint(self) -> str:
        """What the pointer finds: more of it, or the whole of a text that is shown in part."""
        return self.more or (self.text if self.long else "")

    @property
    def long(self) -> bool:
        """Whether it is shown in part."""
        return len(self.text) > _LONG


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
        keys: how many columns, from the first on, name a line.
        facts: columns that say the same in every line, and what they say.
    """

    title: str
    evidence: str
    header: list[str]
    lines: list[list[Field]]
    note: str = ""
    notes: list[str] = field(default_factory=list)
    keys: int = 1
    facts: list[tuple[str, str]] = field(default_factory=list)


def lifted(table: PageTable) -> PageTable:
    """The table without the columns that say the same in every line, which become its facts; empty ones go.

    A table of one line, or of lines that are all the same, stays as it is.
    """
    columns = list(zip(*table.lines, strict=True))
    same = {place for place, column in enumerate(columns) if len({entry.text for entry in column}) == 1}
    if len(table.lines) < 2 or len(same) == len(columns):
        return table
    kept = [place for place in range(len(columns)) if place not in same]
    alike = [(table.header[place], columns[place][0].text) for place in sorted(same)]
    facts = [(name, text) for name, text in alike if text and name not in _SAID]
    return replace(
        table,
        header=[table.header[place] for place in kept],
        lines=[[line[place] for place in kept] for line in table.lines],
        keys=max(1, sum(place < table.keys for place in kept)),
        facts=facts,
    )


def plain_tables(path: Path) -> list[PageTable]:
    """A CSV file line by line, a table for each of its models; of a long one the beginning, and the table says so.

    Lines with a verdict other than ok come first, and verdicts are counted.

    Raises:
        ConfigError: it cannot be read.
    """
    table = read_text(path)
    if _SPLIT not in table or table.empty:
        return [_plain_table(path.stem, "", table)]
    return [_plain_table(path.stem, str(model), own) for model, own in table.groupby(_SPLIT, sort=False)]


def _plain_table(stem: str, model: str, table: pd.DataFrame) -> PageTable:
    kinds = list(table["evidence"].unique()) if "evidence" in table else []
    ordered, counts = _worst_first(table)
    note = f"The first {_LINES_AT_MOST} of {len(table)} lines. " if len(table) > _LINES_AT_MOST else ""
    note = f"{note}{counts}" if len(table) else "No line: nothing was run, or nothing gave a value."
    shown = [[_plain(text) for text in line] for line in ordered.head(_LINES_AT_MOST).itertuples(index=False)]
    numbers = [any(line[place].number is not None for line in shown) for place in range(len(table.columns))]
    title = f"{stem.replace('_', ' ')}{f': {model}' if model else ''}"
    names = [name.replace("_", " ") for name in table.columns]
    evidence = kinds[0] if len(kinds) == 1 else ""
    # Texts name a line, up to the first number.
    keys = numbers.index(True) if True in numbers else 1
    return PageTable(title, evidence, names, shown, note, keys=max(1, keys))


def _worst_first(table: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Lines of checks with those that are not ok first, and how many there are of each; others as they are."""
    if _VERDICT not in table or _FINE not in set(table[_VERDICT]):
        return table, ""
    ordered = table.sort_values(_VERDICT, key=lambda verdicts: verdicts == _FINE, kind="stable")
    counts = ordered[_VERDICT].value_counts(sort=False)
    return ordered, f"Verdicts: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}."


def number_words(value: float) -> str:
    """A number with three digits that count; very small ones with an exponent."""
    return significant(value) if abs(value) >= _SMALL or value == 0 else f"{value:.2e}"


def _plain(text: str) -> Field:
    try:
        value = float(text)
    except ValueError:
        return Field(text)
    return Field(text, value) if value.is_integer() else Field(number_words(value), value, more=text)
