"""Tables of results: CSV files read into pandas DataFrames, and written from them.

A file is checked as a whole before anything of it is used:

    text      UTF-8 without NUL bytes; the last line is complete, and no field is quoted without an end
    digest    the recorded one, where a data package lists the file
    header    no name twice, no needed column absent, no name that looks like a misspelt one; others are left out
    lines     as many fields as the header; no run twice
    values    the type of the column, within its limits; see :mod:`gpipe_bench.results.schema`

pandas is imported by the functions that need it: ``import gpipe_bench`` and ``--help`` do without.
"""

from __future__ import annotations

import csv
import difflib
import hashlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.rows import Record
from gpipe_bench.results.schema import TABLES, Field, column_field, known_columns, parse_value
from gpipe_bench.util.nearest import nearest

if TYPE_CHECKING:
    import pandas as pd

DESCRIPTOR: Final = "datapackage.json"
"""Name of the file that lists the tables of a data package with their digests."""

_DTYPES: Final[Mapping[str, Any]] = {"string": "str", "integer": "Int64", "number": "float64", "boolean": "boolean"}
_SHOWN_PROBLEMS: Final = 5
_MANY_COLUMNS: Final = 20
_DAMAGED: Final = "it may be cut short or damaged: make it again"

R = TypeVar("R", bound=Record)


COMPANIONS: Final = {name: TABLES[name].columns for name in ("devices", "steps", "events")}
"""Columns of the tables beside ``<experiment>.csv``."""


def companion_path(rows: Path, name: str) -> Path:
    """Where a companion of the table at ``rows`` lies: ``ablation.csv`` -> ``ablation_steps.csv``."""
    return rows.with_name(f"{rows.stem}_{name}{rows.suffix}")


def read_table(
    path: Path,
    needed: Sequence[str] = (),
    records: type[Record] | None = None,
    *,
    given: Sequence[str] = (),
    kind: str = "",
    key: Sequence[str] = (),
    empty: bool = False,
) -> pd.DataFrame:
    """A table with the types of its columns: str, Int64, float64 and boolean, in the order of the file.

    Args:
        path: a CSV file.
        needed: columns that must be there.
        records: the rows that the table is made of: their columns that are absent get their defaults, and no row with
            a name may be there twice. By default the columns of any table are known.
        given: columns without empty fields.
        kind: of the table, where a name of a column means something else in it than in others.
        key: columns that together are never the same in two lines where the first of them is not empty; those of them
            that are there count.
        empty: whether there may be no lines.

    Raises:
        ConfigError: the file cannot be read, is not whole, lacks columns, or holds values that do not fit; all such
            problems, the first lines by their numbers.
    """
    text = read_text(path)
    if text.empty and not empty:
        raise ConfigError([f"table must have at least one row, got a header alone at {path}; run and collect it first"])
    if problems := _header_problems(path, list(text.columns), needed, records):
        raise ConfigError(problems)
    table_name = records.TABLE if records else kind
    described = known_columns(records.TABLE if records else "")
    known = [name for name in text.columns if name in described]
    wrong: list[tuple[int, str]] = []
    table = text[known].copy()
    for name in known:
        field = column_field(name, table_name)
        if name in given:
            field = {**field, "constraints": {**field.get("constraints", {}), "required": True}}
        values, messages = _parsed(field, text[name].unique())
        table[name] = text[name].map(values).astype(_DTYPES[field["type"]])
        wrong += [(line, messages[entry]) for line, entry in enumerate(text[name]) if entry in messages]
    if records and records.NAMED_BY in table:
        key = (records.NAMED_BY, *(name for name in table.columns if name != records.NAMED_BY))
    wrong += _repeated(table, key)
    _refuse(path, wrong)
    return _complete(table, records) if records else table


def read_records(path: Path, needed: Sequence[str], kind: type[R]) -> list[R]:
    """The rows of a table as objects.

    Raises:
        ConfigError: as :func:`read_table`, or a rule of the rows is broken.
    """
    rows: list[R] = []
    wrong: list[tuple[int, str]] = []
    for line, record in enumerate(plain_records(read_table(path, needed, kind))):
        try:
            rows.append(kind(**{name: value for name, value in record.items() if value is not None}))
        except ValueError as error:
            wrong.append((line, str(error)))
    _refuse(path, wrong)
    return rows


def plain_records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of a table as dictionaries of plain values; None where a field is empty."""
    records = table.astype(object).where(table.notna(), None).to_dict("records")
    return [{str(name): value for name, value in record.items()} for record in records]


def frame_of(rows: Iterable[R], kind: type[R]) -> pd.DataFrame:
    """Rows as a table with the types of :func:`read_table`, a line each in their order."""
    import pandas as pd

    return _complete(pd.DataFrame([row.to_dict() for row in rows], dtype=object), kind)


def _complete(table: pd.DataFrame, kind: type[Record]) -> pd.DataFrame:
    """The table with all columns of its rows, in their order and with their types."""
    absent: dict[str, Any] = {column.name: column.default for column in fields(kind) if column.name not in table}
    dtypes = {name: _DTYPES[column_field(name, kind.TABLE)["type"]] for name in kind.columns()}
    return table.assign(**absent)[[*dtypes]].astype(dtypes)


def read_text(path: Path, *, listed: bool = True) -> pd.DataFrame:
    """A table whose fields are texts, as they stand in the file.

    Args:
        path: a CSV file.
        listed: whether it must have the digest that a data package records of it.

    Raises:
        ConfigError: it cannot be read, or is not a whole CSV file.
    """
    import pandas as pd

    text = _content(path, listed=listed)
    options: dict[str, Any] = {"header": None, "dtype": str, "keep_default_na": False, "skip_blank_lines": False}
    try:
        # This engine leaves a field that is not there missing; others take it for an empty one.
        lines = pd.read_csv(io.StringIO(text, newline=""), engine="python", **options)
    except (pd.errors.ParserError, pd.errors.EmptyDataError, csv.Error) as error:
        raise ConfigError([f"table must be a readable CSV file, got {path} ({error}); {_DAMAGED}"]) from error
    header = [str(name) for name in lines.iloc[0]]
    if double := [name for name in dict.fromkeys(header) if header.count(name) > 1]:
        raise ConfigError([f"columns of {path} must differ, got {double[0]!r} twice; {_DAMAGED}"])
    table: pd.DataFrame = lines.iloc[1:].reset_index(drop=True)
    table.columns = pd.Index(header)
    short = table.index[table.isna().any(axis=1)]
    _refuse(path, [(line, f"line must have {len(header)} fields, got fewer; {_DAMAGED}") for line in short])
    return table


def header_of(path: Path) -> list[str]:
    """The names of the columns of a table; none where it cannot be read, of which reading it says why."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return next(csv.reader(file), [])
    except (OSError, UnicodeDecodeError, csv.Error):
        return []


def csv_text(columns: Sequence[str], records: Iterable[Mapping[str, Any]] | pd.DataFrame) -> str:
    """A table as text: ``True`` and ``False``, empty for None, the shortest numbers that read back to the same bits.

    Args:
        columns: the header.
        records: a line each; columns that a record lacks are empty.

    Raises:
        ValueError: a record with another column.
    """
    import pandas as pd

    table = records if isinstance(records, pd.DataFrame) else pd.DataFrame(list(records), dtype=object)
    if strange := [name for name in table.columns if name not in columns]:
        raise ValueError(f"records must have the columns of the table, got {strange}; name them, or leave them out")
    return table.reindex(columns=list(columns)).to_csv(index=False, lineterminator="\n")


def lines_text(lines: Iterable[Sequence[object]]) -> str:
    """Lines of a table as text, the header first: as :func:`csv_text`, but without pandas; numbers must be finite."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _content(path: Path, *, listed: bool) -> str:
    """The text of a file, once it is known to be whole."""
    rule = "table must be a readable CSV file"
    try:
        data = path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{rule}, got {path} ({error}); collect the results first"]) from error
    if not text.strip():
        raise ConfigError([f"table must have at least one row, got an empty file at {path}; run and collect it first"])
    if "\0" in text:
        raise ConfigError([f"{rule}, got {path} with NUL bytes; {_DAMAGED}"])
    if not text.endswith(("\n", "\r")):
        raise ConfigError([f"{rule}, got {path} without a line end after its last line; {_DAMAGED}"])
    if listed and (digest := _recorded(path.resolve())) and digest != f"sha256:{hashlib.sha256(data).hexdigest()}":
        remedy = "restore the file, or if the change is meant, write them anew: python -m gpipe_bench datapackage write"
        raise ConfigError([f"table must have the digest that {DESCRIPTOR} records, got another for {path}; {remedy}"])
    return text


def _recorded(path: Path) -> str:
    """The digest that a data package above the file records of it; empty where none does."""
    for folder in path.parents:
        descriptor = folder / DESCRIPTOR
        if descriptor.is_file():
            return recorded_digests(descriptor).get(path.relative_to(folder).as_posix(), "")
    return ""


def recorded_digests(descriptor: Path) -> dict[str, str]:
    """The digest of each table that a descriptor lists, by its path.

    Raises:
        ConfigError: no descriptor that ``datapackage write`` wrote.
    """
    return _digests(descriptor, descriptor.stat().st_mtime_ns)


@cache
def _digests(descriptor: Path, _changed_ns: int) -> dict[str, str]:
    try:
        package = json.loads(descriptor.read_text(encoding="utf-8"))
        return {str(one["path"]): str(one["hash"]) for one in package["resources"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = "descriptor must be one that datapackage write wrote"
        raise ConfigError([f"{rule}, got {descriptor} ({type(error).__name__}: {error}); write it anew"]) from error


def _header_problems(
    path: Path, names: Sequence[str], needed: Sequence[str], records: type[Record] | None
) -> list[str]:
    """Needed columns that are absent, and strange ones that look like a known column which is absent."""
    lost = [name for name in needed if name not in names]
    problems = [
        f"columns of {path} must include {name!r}, got none of that name; {nearest(name, names)}" for name in lost
    ]
    other = next((table.name for table in TABLES.values() if tuple(names) in table.headers), "")
    if lost and (other or len(lost) > _MANY_COLUMNS or len(lost) == len(needed) > 1):
        found = f"those of a table of {other}" if other else "none of them"
        return [f"columns of {path} must include {', '.join(lost)}, got {found}; name another table"]
    known = known_columns(records.TABLE if records else "")
    absent = sorted(known - {*names, *needed})
    for name in names:
        close = [] if name in known else difflib.get_close_matches(name, absent, n=1, cutoff=0.8)
        problems += [f"columns of {path} must be known, got {name!r}; did you mean {near!r}?" for near in close]
    return problems


def _parsed(field: Field, texts: Iterable[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """The value of each text of a column, and of texts that do not fit what is wrong with them."""
    empty = "" if field["type"] == "string" else None
    values: dict[str, Any] = {}
    messages: dict[str, str] = {}
    for text in texts:
        try:
            value = parse_value(field, text)
            values[text] = empty if value is None else value
        except ValueError as error:
            messages[text] = str(error)
    return values, messages


def _repeated(table: pd.DataFrame, key: Sequence[str]) -> list[tuple[int, str]]:
    """Lines that are the same as an earlier one in the columns of a key."""
    if not key:
        return []
    key = [name for name in key if name in table]
    again = table.duplicated(key) & (table[key[0]] != "")
    what = "" if len(key) == len(table.columns) else f" in {' or '.join(key)}"
    message = f"line must differ{what} from those above, got the same; drop one of the two"
    return [(line, message) for line in table.index[again]]


def _refuse(path: Path, wrong: Sequence[tuple[int, str]]) -> None:
    """Raise the problems of the first lines, and how many more there are."""
    lines = [f"{path}, line {line + 2}: {message}" for line, message in sorted(wrong)]
    if len(lines) > _SHOWN_PROBLEMS:
        lines[_SHOWN_PROBLEMS:] = [f"and {len(lines) - _SHOWN_PROBLEMS} more lines like these"]
    if lines:
        raise ConfigError(lines)
