"""What each table holds: its columns with type, unit, meaning and limits, its key, and where its lines lead.

All of it stands in ``schema.json``; ``docs/columns.md`` and the data package are generated from there. A field is
written as in a Frictionless table schema:

    {"name": "chunks", "type": "integer", "description": "...", "unit": "...", "constraints": {"minimum": 1}}

A column that is ``added`` may be missing in older tables. A name alone stands for the field that the first table
above declares under that name.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.schedules.table import SCHEDULES
from gpipe_bench.settings import BACKWARDS, CHECKPOINT_MODES, FLAVOURS, TRANSFERS

Field = Mapping[str, Any]

ROWS_BESIDE: Final = ""
"""Target of a link: the table of rows that this one is a companion of."""

CONFIGURATIONS_BESIDE: Final = "_configurations"
"""Target of a link: the configurations of the same experiment."""

_SCHEMA: Final = Path(__file__).with_name("schema.json")
_CHOICES: Final[Mapping[str, Sequence[str]]] = {
    "backward": BACKWARDS,
    "checkpoint": CHECKPOINT_MODES,
    "flavour": FLAVOURS,
    "transfer": TRANSFERS,
}
"""Columns whose values other modules name."""

_SCHEDULES: Final = "|".join([*SCHEDULES, r".*\.csv"])
"""What the column ``schedule`` has: a name, or the path of a file."""

_SHOWN_PROBLEMS: Final = 20
_WORDS: Final = {"string": "str", "integer": "int", "number": "float", "boolean": "bool"}
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_TRUTH: Final = {"true": True, "false": False, "1": True, "0": False}


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """Columns by which every line leads to one or more lines of another table.

    Attributes:
        columns: here.
        table: path of the other table below the folder of results, :data:`ROWS_BESIDE` or
            :data:`CONFIGURATIONS_BESIDE`.
        others: their names there.
    """

    columns: tuple[str, ...]
    table: str
    others: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A kind of table.

    Attributes:
        name: short name.
        title: what such a table is called.
        line: what one line of it is.
        fields: by name of the column, in their order.
        key: columns that together are never the same in two lines; empty where lines may repeat.
        links: to the tables that say more of each line, such as its provenance.
    """

    name: str
    title: str
    line: str
    fields: Mapping[str, Field]
    key: tuple[str, ...]
    links: tuple[ForeignKey, ...]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns: the header."""
        return tuple(self.fields)

    @property
    def headers(self) -> tuple[tuple[str, ...], ...]:
        """The header, and those of tables from before columns were added at the end, the oldest one last."""
        added = sum(bool(field.get("added")) for field in self.fields.values())
        return tuple(self.columns[: len(self.columns) - k] for k in range(added + 1))

    def of(self, header: Sequence[str]) -> Table:
        """This kind of table with some of its columns only."""
        return replace(self, fields={name: self.fields[name] for name in header})

    def problems(self, record: Mapping[str, Any]) -> Iterator[str]:
        """What is wrong with a line as plain data; a column may be missing where nothing has to be known."""
        for name in record.keys() - self.fields.keys():
            yield f"{name!r} must be a column of {self.name}, got an unknown one"
        for name, field in self.fields.items():
            value = record.get(name)
            try:
                check_value(field, None if value == "" else value)
            except ValueError as error:
                yield str(error)


def _load() -> dict[str, Table]:
    known: dict[str, Field] = {}
    tables: dict[str, Table] = {}
    for name, words in json.loads(_SCHEMA.read_text(encoding="utf-8")).items():
        fields: dict[str, Field] = {}
        for entry in words["fields"]:
            field: Field = known[entry] if isinstance(entry, str) else entry
            if choices := _CHOICES.get(field["name"]):
                field = {**field, "constraints": {"enum": list(choices)}}
            elif field["name"] == "schedule":
                field = {**field, "constraints": {"pattern": _SCHEDULES}}
            fields[field["name"]] = field
            known.setdefault(field["name"], field)
        links = [
            ForeignKey(tuple(link["columns"]), link["table"], tuple(link.get("others", link["columns"])))
            for link in words.get("links", ())
        ]
        tables[name] = Table(name, words["title"], words["line"], fields, tuple(words["key"]), tuple(links))
    return tables


TABLES: Final[Mapping[str, Table]] = _load()
"""Every kind of table by its name."""

OF_RUNS: Final = ("rows", "transparency", "peers")
"""Kinds of tables whose lines are runs, with their provenance."""


def known_columns(table: str = "") -> frozenset[str]:
    """The columns of a kind of table; without one, those of any."""
    tables = [TABLES[table]] if table else TABLES.values()
    return frozenset(name for one in tables for name in one.fields)


def column_field(name: str, table: str = "") -> Field:
    """The field of a column, as its kind of table declares it, else the first that has such a column.

    Raises:
        ConfigError: no table has it.
    """
    own = [TABLES[table]] if table else []
    for one in (*own, *TABLES.values()):
        if name in one.fields:
            return one.fields[name]
    raise ConfigError([f"every column must be declared, got {name!r}; add it to {_SCHEMA.name}"])


def table_of(header: Sequence[str], path: Path) -> Table:
    """The kind of the table with this header.

    Raises:
        ConfigError: no kind has these columns; names the nearest one and where the two differ.
    """
    for table in TABLES.values():
        if tuple(header) in table.headers:
            return table.of(header)
    near = max(TABLES.values(), key=lambda table: difflib.SequenceMatcher(None, table.columns, tuple(header)).ratio())
    missing = [name for name in near.columns if name not in header]
    extra = [name for name in header if name not in near.columns]
    how = "; ".join(f"{word} {', '.join(names)}" for word, names in (("without", missing), ("with", extra)) if names)
    found = f"got those of {near.name} {how or 'in another order'}"
    advice = f"make the table anew, or declare its columns in {_SCHEMA.name}"
    raise ConfigError([f"columns of {path} must be those of a known kind of table, {found}; {advice}"])


def raw_problems(path: Path, tables: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[str]:
    """What is wrong with the records of a raw result: the first of them, and how many more.

    Args:
        path: the file.
        tables: records by the name of their table.
    """
    advice = "delete it, then run it again"
    problems = [
        f"raw result must hold what its columns may, got in {path}, {name} {number}: {problem}; {advice}"
        for name, records in tables.items()
        for number, record in enumerate(records, start=1)
        for problem in TABLES[name].problems(record)
    ]
    rest = len(problems) - _SHOWN_PROBLEMS
    return problems[:_SHOWN_PROBLEMS] + ([f"and {rest} more like these in {path}; {advice}"] if rest > 0 else [])


def parse_value(field: Field, text: str) -> Any:
    """The value of a text; None where it is empty.

    Raises:
        ValueError: it is not of the type, or outside the limits.
    """
    text, kind = text.strip(), field["type"]
    value: Any = text or None
    if text and kind == "boolean":
        value = _TRUTH.get(text.lower(), text)
    elif text and kind != "string" and _NUMBER.fullmatch(text):
        value = float(text)
        # A table with gaps that pandas wrote has 4.0 for 4.
        value = int(value) if kind == "integer" and value.is_integer() else value
    check_value(field, value, repr(text))
    return value


def check_value(field: Field, value: Any, got: str = "") -> None:
    """Check a value of a column, None where it has none.

    Raises:
        ValueError: it is not of the type, or outside the limits.
    """
    name, kind, limits = field["name"], field["type"], field.get("constraints", {})
    if value is None:
        if limits.get("required"):
            raise ValueError(f"{name} must be given, got nothing; fill it in")
        return
    rule = ""
    if not _is_of(kind, value):
        rule = f"of type {_WORDS[kind]}"
    elif kind == "number" and not math.isfinite(value):
        rule = "a finite number"
    elif value not in limits.get("enum", (value,)):
        rule = f"one of {', '.join(limits['enum'])}"
    elif not limits.get("minimum", value) <= value <= limits.get("maximum", value):
        ends = [
            f"at {word} {limits[end]}" for end, word in (("minimum", "least"), ("maximum", "most")) if end in limits
        ]
        rule = " and ".join(ends)
    elif "pattern" in limits and not re.fullmatch(limits["pattern"], value):
        rule = f"of the form {limits['pattern']}"
    if rule:
        raise ValueError(f"{name} must be {rule}, got {got or repr(value)}; correct it, or make the file again")


def _is_of(kind: str, value: Any) -> bool:
    if kind in ("string", "boolean"):
        return isinstance(value, str if kind == "string" else bool)
    return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
