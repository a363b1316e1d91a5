"""CSV files as tables of the page: medians over repeats, no column that says nothing, numbers of three digits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import pandas as pd

from gpipe_bench.figures.text import significant

if TYPE_CHECKING:
    from collections.abc import Hashable

_HIDDEN: Final = (
    *("config_sha256", "commit", "dirty", "started_utc", "schema_version", "cell", "case", "seed", "experiment"),
    *("python", "driver", "cuda", "source", "package_version", "clock_error_us", "gradient_tolerance", "steps"),
    *(
        "clock_cycle",
        "fork_join",
        "copy_streams",
        "portals",
        "early_recompute",
        "rounds",
        "limit_ms",
        "cores",
        "reason",
    ),
)
"""Columns that the provenance has, or the file alone."""

_LINES_AT_MOST: Final = 40
_SMALL: Final = 1e-3
_LONG: Final = 30
_LONGEST: Final = 90
_FRACTION: Final = "_fraction"


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a table: its text, and what the pointer finds on it."""

    text: str
    hint: str = ""


@dataclass(slots=True)
class PageTable:
    """A table as the page shows it.

    Attributes:
        title: shown above it.
        evidence: of all of its lines; empty where they differ or have none.
        header: names of the columns.
        lines: a field per column in each.
        facts: what every line says alike.
        total: how many lines the file gives; ``lines`` are the first of them.
    """

    title: str
    evidence: str
    header: list[str]
    lines: list[list[Field]]
    facts: list[str] = field(default_factory=list)
    total: int = 0


def page_table(title: str, table: pd.DataFrame) -> PageTable:
    """A CSV file, read as text, as a table; of a long one the beginning.

    Repeats of a cell become one line with their number and medians. Columns that are the same in every line become
    facts. Lines with a verdict other than ok come first.
    """
    evidence = [*table["evidence"].unique()] if "evidence" in table else []
    shown = table.drop(columns=[name for name in _HIDDEN if name in table])
    if "verdict" in shown:
        shown = shown.sort_values("verdict", key=lambda verdicts: verdicts == "ok", kind="stable")
    shown = _medians(shown) if "repeat" in shown else shown
    total = len(shown)
    alike = [name for name in shown if len(shown) > 1 and len({*shown[name]}) == 1]
    facts = [f"{_words(name)} {shown[name].iloc[0]}" for name in alike if shown[name].iloc[0] and name != "evidence"]
    shown = shown.drop(columns=alike).head(_LINES_AT_MOST)
    lines = [[_field(name, text) for name, text in zip(shown, line, strict=True)] for line in shown.to_numpy()]
    return PageTable(title, evidence[0] if len(evidence) == 1 else "", [*map(_words, shown)], lines, facts, total)


def _medians(table: pd.DataFrame) -> pd.DataFrame:
    """One line per cell: columns with a fraction in any of their numbers are values, all others name the cell."""
    values = [name for name in table if table[name].str.contains(r"^-?\d+\.\d|^-?\d[\d.]*e", regex=True).any()]
    keys: list[Hashable] = [name for name in table if name not in (*values, "repeat")]
    numbers = table.assign(**{str(name): pd.to_numeric(table[name], errors="coerce") for name in values})
    grouped = numbers.groupby(keys, sort=False, dropna=False)
    medians = grouped[values].median().map(lambda value: "" if pd.isna(value) else repr(float(value)))
    counts = grouped.size().astype(str).rename("n")
    return pd.concat([counts, medians], axis=1).reset_index()[[*keys, "n", *values]]


def _words(name: Hashable) -> str:
    text = str(name)
    return f"{text.removesuffix(_FRACTION)} %".replace("_", " ") if text.endswith(_FRACTION) else text.replace("_", " ")


def _field(name: Hashable, text: str) -> Field:
    try:
        value = float(text)
    except ValueError:
        return Field(text) if len(text) <= _LONG else Field(f"{text[:_LONG]}…", hint=text[:_LONGEST])
    scaled = 100 * value if str(name).endswith(_FRACTION) else value
    short = significant(scaled) if abs(scaled) >= _SMALL or scaled == 0 else f"{scaled:.2e}"
    return Field(text if scaled == value and value.is_integer() else short)
