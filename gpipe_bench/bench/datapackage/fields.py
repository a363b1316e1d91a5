"""What the columns of each kind of table hold: type, unit, meaning, and the values that are allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from gpipe_bench.bench.datapackage.kinds import TableKind
from gpipe_bench.errors import ConfigError
from gpipe_bench.peer_rows import PeerRow
from gpipe_bench.rows import EVIDENCE, STATUSES, Row
from gpipe_bench.schedule import CHECKPOINT_MODES
from gpipe_bench.transparency_rows import TransparencyRow

__all__ = ["table_schema"]

_COLUMNS: Final = Path(__file__).with_name("columns.yaml")
_TYPES: Final = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}
_ENUMS: Final[Mapping[str, Sequence[str]]] = {
    "evidence": EVIDENCE,
    "status": STATUSES,
    "checkpoint": CHECKPOINT_MODES,
    "backward": ("autograd", "scheduled"),
    "transfer": ("direct", "host"),
    "flavour": ("current", "published"),
    "precision": ("float32", "float64"),
    "arm": ("plain", "accumulated", "pipeline"),
}
_REQUIRED: Final = frozenset({"evidence", "status", "schema_version"})
_COUNTS: Final = frozenset({"partitions", "chunks", "microbatches", "batch_size", "device_count", "steps"})
_PATTERNS: Final = {"balance": r"\d+(-\d+)*", "config_sha256": r"[0-9a-f]{64}"}
_NOT_NEGATIVE: Final = ("_s", "_ms", "_us", "_gib", "_mib")


def table_schema(kind: TableKind) -> dict[str, Any]:
    """The Frictionless table schema of a kind: a field per column, and missing values."""
    own = {column.name: column for column in fields(kind.records)} if kind.records else {}
    described = [
        _record_field(name, str(own[name].type), own[name].metadata) if name in own else _shared_field(name, kind)
        for name in kind.columns
    ]
    return {"fields": described, "missingValues": [""]}


def _record_field(name: str, annotation: str, metadata: Mapping[str, str]) -> dict[str, Any]:
    """The field of a column that a dataclass of rows describes."""
    kind = _TYPES[annotation.removesuffix(" | None")]
    limits = _constraints(name, kind)
    return _field(name, kind, metadata["text"], metadata["unit"], limits)


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


def _shared_field(name: str, kind: TableKind) -> dict[str, Any]:
    """The field of a column of any other table: from the glossary, else as in a row."""
    words = _glossary().get(f"{kind.name}.{name}", _glossary().get(name))
    if words is not None:
        return _field(
            name, words.get("type", "string"), words["text"], words.get("unit", ""), dict(words.get("constraints", {}))
        )
    for records in (Row, TransparencyRow, PeerRow):
        for column in fields(records):
            if column.name == name:
                return _record_field(name, str(column.type), column.metadata)
    raise ConfigError([f"every column must be described, got {name!r} without words; add it to {_COLUMNS.name}"])


def _field(name: str, kind: str, text: str, unit: str, constraints: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": name, "type": kind, "description": text}
    if unit:
        found["unit"] = unit
    if constraints:
        found["constraints"] = constraints
    return found


@cache
def _glossary() -> dict[str, dict[str, Any]]:
    loaded: dict[str, dict[str, Any]] = yaml.safe_load(_COLUMNS.read_text(encoding="utf-8"))
    return loaded
