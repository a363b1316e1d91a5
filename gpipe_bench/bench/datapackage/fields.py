"""What the columns of each kind of table hold: type, unit, meaning, and the values that are allowed."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Final

import yaml

from gpipe_bench.bench.tables import COMPANIONS
from gpipe_bench.errors import ConfigError
from gpipe_bench.peer_rows import RATIO_COLUMNS, PeerRow
from gpipe_bench.peer_rows import STEP_COLUMNS as PEER_STEP_COLUMNS
from gpipe_bench.rows import EVIDENCE, STATUSES, Row
from gpipe_bench.schedule import CHECKPOINT_MODES
from gpipe_bench.transparency_rows import LAYER_COLUMNS, STEP_COLUMNS, VERDICT_COLUMNS, TransparencyRow

__all__ = ["KINDS", "TableKind", "kind_of", "table_schema"]

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


@dataclass(frozen=True, slots=True)
class TableKind:
    """A kind of table, known by its header.

    Attributes:
        name: short name.
        title: what the table is called.
        text: what one line of it is.
        columns: the header.
        key: columns that together are never the same in two lines; empty where lines may repeat.
        records: the dataclass that describes its columns, if one does.
    """

    name: str
    title: str
    text: str
    columns: tuple[str, ...]
    key: tuple[str, ...] = ()
    records: type[Row | TransparencyRow | PeerRow] | None = None


_PUBLISHED: Final = (
    *("source", "table", "experiment", "model", "model_args", "partitions", "chunks"),
    *("metric", "value", "unit", "status", "notes"),
)
_SETTINGS: Final = (
    *("table", "experiment", "model", "model_args", "partitions", "chunks", "checkpoint", "batch_size", "balance"),
    *("microbatches", "microbatch_size", "last_microbatch_size", "full_steps", "rest_batch_size"),
    *("optimizer", "loss", "notes"),
)
_PREDICTIONS: Final = ("table", "experiment", "metric", "published", "simulated", "error_fraction", "role")
KINDS: Final = (
    TableKind("rows", "Rows", "one repeat of one cell", Row.columns(), records=Row),
    TableKind("devices", "Partitions", "one partition of one repeat of a cell", tuple(COMPANIONS["devices"])),
    TableKind("steps", "Steps", "one timed step of one repeat of a cell", tuple(COMPANIONS["steps"])),
    TableKind("events", "Timelines", "one task of one step of a cell", tuple(COMPANIONS["events"])),
    TableKind(
        *("published", "Printed values", "one printed value", _PUBLISHED),
        key=("source", "table", "experiment", "model_args", "metric"),
    ),
    TableKind("settings", "Settings", "how one published cell was run", _SETTINGS, ("table", "experiment")),
    TableKind(
        *("predictions", "Predictions", "one published cell and what the simulator says of it", _PREDICTIONS),
        key=("table", "experiment", "metric"),
    ),
    TableKind("transparency", "Training", "one training run", TransparencyRow.columns(), records=TransparencyRow),
    TableKind("transparency-steps", "Training by step", "one step of a training run", tuple(STEP_COLUMNS)),
    TableKind(
        *("transparency-layers", "Training by layer", "one batch normalisation of a training run"),
        tuple(LAYER_COLUMNS),
    ),
    TableKind("transparency-verdicts", "Verdicts", "one claim over seeds", tuple(VERDICT_COLUMNS)),
    TableKind("peers", "Race", "one contender on one workload", PeerRow.columns(), records=PeerRow),
    TableKind("peers-steps", "Race by step", "one timed step of a contender", PEER_STEP_COLUMNS),
    TableKind("peers-ratios", "Race by pair", "one contender and one baseline on one workload", RATIO_COLUMNS),
)


def kind_of(header: Sequence[str], path: Path) -> TableKind:
    """The kind of the table with this header.

    Raises:
        ConfigError: no kind has these columns; names the nearest one and where the two differ.
    """
    for kind in KINDS:
        if kind.columns == tuple(header):
            return kind
    near = max(KINDS, key=lambda kind: difflib.SequenceMatcher(None, kind.columns, tuple(header)).ratio())
    missing = [name for name in near.columns if name not in header]
    extra = [name for name in header if name not in near.columns]
    how = "; ".join(f"{word} {', '.join(names)}" for word, names in (("without", missing), ("with", extra)) if names)
    found = f"got those of {near.name} {how or 'in another order'}"
    advice = f"make the table anew, or describe its columns in {_COLUMNS.name}"
    raise ConfigError([f"columns of {path} must be those of a known kind of table, {found}; {advice}"])


def table_schema(kind: TableKind) -> dict[str, Any]:
    """The Frictionless table schema of a kind: a field per column, missing values, and the key."""
    own = {column.name: column for column in fields(kind.records)} if kind.records else {}
    described = [
        _record_field(name, str(own[name].type), own[name].metadata) if name in own else _shared_field(name)
        for name in kind.columns
    ]
    return {
        "fields": described,
        "missingValues": [""],
        **({"primaryKey": list(kind.key)} if kind.key else {}),
    }


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


def _shared_field(name: str) -> dict[str, Any]:
    """The field of a column of any other table: from the glossary, else as in a row."""
    words = _glossary().get(name)
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
