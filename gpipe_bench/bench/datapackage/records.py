"""Whether records hold what the columns of their table may: types, ranges and names are those of the descriptor."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from gpipe_bench.bench.datapackage.descriptor import table_schema
from gpipe_bench.bench.datapackage.kinds import KINDS
from gpipe_bench.results.columns import check_value

_AT_MOST: Final = 20
_RULES: Final = {"integer": "a whole number", "number": "a finite number", "boolean": "true or false", "string": "text"}


def record_problems(kind: str, record: Mapping[str, Any]) -> Iterator[str]:
    """Problems of a record of plain data: the column, its rule and the value.

    Args:
        kind: name of the kind of table that it is a line of.
        record: values by column; a column may be missing where nothing has to be known.
    """
    known = _fields(kind)
    for name in record:
        if name not in known:
            yield f"{_shown(name)} must be a column of {kind}, got an unknown one"
    for name, field in known.items():
        value = record.get(name)
        if not _fits(field, value):
            yield f"{name} must be {_rule(field)}, got {_shown(value)}"


def table_problems(
    path: Path, kinds: Mapping[str, str], tables: Mapping[str, Iterable[Mapping[str, Any]]]
) -> list[str]:
    """What is wrong with the records of a raw result: the first of them, and how many more.

    Args:
        path: the file.
        kinds: for each of its tables the kind.
        tables: records of each.
    """
    problems = [
        f"raw result must hold what its columns may, got in {path}, {name} {number}: {problem}; run it again"
        for name, kind in kinds.items()
        for number, record in enumerate(tables[name], start=1)
        for problem in record_problems(kind, record)
    ]
    rest = len(problems) - _AT_MOST
    return problems[:_AT_MOST] + ([f"and {rest} more like these in {path}; run it again"] if rest > 0 else [])


@cache
def _fields(kind: str) -> dict[str, dict[str, Any]]:
    (found,) = (candidate for candidate in KINDS if candidate.name == kind)
    return {field["name"]: field for field in table_schema(found)["fields"]}


def _fits(field: Mapping[str, Any], value: Any) -> bool:
    """Whether a column may hold a value; empty text and None say that it is not known."""
    try:
        check_value(field, None if value == "" else value)
    except ValueError:
        return False
    return True


def _rule(field: Mapping[str, Any]) -> str:
    limits = field.get("constraints", {})
    rule = f"one of {', '.join(limits['enum'])}" if "enum" in limits else _RULES[field["type"]]
    rule += f" like {limits['pattern']}" if "pattern" in limits else ""
    words = [
        f"at {word} {limits[name]}" for word, name in (("least", "minimum"), ("most", "maximum")) if name in limits
    ]
    return f"{rule}{', ' if words else ''}{' and '.join(words)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."
