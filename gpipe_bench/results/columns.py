"""What each column of a table holds: type, unit, meaning, and the values that are allowed.

This is the one source of limits. The data package describes its tables by them, and whatever reads a table or a raw
result checks its values by them. A field is written as in a Frictionless table schema:

    {"name": "chunks", "type": "integer", "description": "...", "unit": "...", "constraints": {"minimum": 1}}
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final

from gpipe_bench.choices import BACKWARDS, CHECKPOINT_MODES, FLAVOURS, TRANSFERS
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.peer_rows import PeerRow
from gpipe_bench.results.rows import EVIDENCE, STATUSES, Record, Row
from gpipe_bench.results.transparency_rows import TransparencyRow
from gpipe_bench.schedules import SCHEDULES

Field = Mapping[str, Any]

_COLUMNS: Final = Path(__file__).with_name("columns.yaml")
_TYPES: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_WORDS: Final = {kind: word for word, kind in _TYPES.items()}
_RECORDS: Final[Sequence[type[Record]]] = (Row, TransparencyRow, PeerRow)
_ENUMS: Final[Mapping[str, Sequence[str]]] = {
    "evidence": EVIDENCE,
    "status": STATUSES,
    "checkpoint": CHECKPOINT_MODES,
    "backward": BACKWARDS,
    "schedule": SCHEDULES,
    "transfer": TRANSFERS,
    "flavour": FLAVOURS,
    "precision": ("float32", "float64"),
    "arm": ("plain", "accumulated", "pipeline"),
}
_REQUIRED: Final = frozenset({"evidence", "status", "schema_version"})
_COUNTS: Final = frozenset(
    {"partitions", "chunks", "microbatches", "batch_size", "device_count", "steps", "processes", "hosts"}
)
_PATTERNS: Final = {"balance": r"\d+(-\d+)*", "config_sha256": r"[0-9a-f]{64}"}
_NOT_NEGATIVE: Final = ("_s", "_ms", "_us", "_gib", "_mib")
_ENDS: Final = {"minimum": "at least", "maximum": "at most"}
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.ASCII | re.IGNORECASE)
_TRUTH: Final = {"true": True, "false": False, "1": True, "0": False}


def known_columns(records: type[Record] | None = None) -> frozenset[str]:
    """The columns that are described, of rows of one kind or else of any table."""
    kinds = [records] if records else _RECORDS
    return frozenset([*(() if records else _glossary()), *(name for kind in kinds for name in kind.columns())])


def column_field(name: str, records: type[Record] | None = None, table: str = "") -> Field:
    """The field of a column.

    Args:
        name: of the column.
        records: the rows that it belongs to. Without them, or where they have no such column, the glossary
            ``columns.yaml`` decides, and then the first kind of rows that has it.
        table: kind of table, for names that mean something else in one kind.

    Raises:
        ConfigError: nothing describes it.
    """
    words = _glossary().get(f"{table}.{name}", _glossary().get(name))
    kinds = [kind for kind in _RECORDS if name in kind.columns()]
    if records in kinds:
        return _record_field(name, records)
    if words is not None:
        limits = dict(words.get("constraints", {}))
        return _field(name, words.get("type", "string"), words["text"], words.get("unit", ""), limits)
    if kinds:
        return _record_field(name, kinds[0])
    raise ConfigError([f"every column must be described, got {name!r} without words; add it to {_COLUMNS.name}"])


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


def _record_field(name: str, records: type[Record]) -> Field:
    """The field of a column that a dataclass of rows describes."""
    (own,) = (column for column in fields(records) if column.name == name)
    kind = _TYPES[str(own.type).removesuffix(" | None")]
    return _field(name, kind, own.metadata["text"], own.metadata["unit"], _constraints(name, kind))


def _constraints(name: str, kind: str) -> dict[str, Any]:
    limits: dict[str, Any] = {"required": True} if name in _REQUIRED else {}
    if name in _ENUMS:
        limits["enum"] = list(_ENUMS[name])
    if name in _PATTERNS:
        limits["pattern"] = _PATTERNS[name]
    if name.endswith("_fraction"):
        limits |= {"minimum": 0, "maximum": 1}
    elif kind == "number" and name.endswith(_NOT_NEGATIVE) and not name.startswith("gap_"):
        limits["minimum"] = 0
    elif kind == "integer":
        limits["minimum"] = 1 if name in _COUNTS else 0
    return limits


def _field(name: str, kind: str, text: str, unit: str, constraints: dict[str, Any]) -> Field:
    found: dict[str, Any] = {"name": name, "type": kind, "description": text}
    if unit:
        found["unit"] = unit
    if constraints:
        found["constraints"] = constraints
    return found


@cache
def _glossary() -> dict[str, dict[str, Any]]:
    import yaml  # where a table is checked: what reads stored results does without

    loaded: dict[str, dict[str, Any]] = yaml.safe_load(_COLUMNS.read_text(encoding="utf-8"))
    return loaded
