"""Kinds of tables: known by their headers, with the columns that tell lines apart and lead to other tables."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from gpipe_bench.bench.storage.tables import COMPANIONS
from gpipe_bench.errors import ConfigError
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS
from gpipe_bench.results.peer_rows import RATIO_COLUMNS, PeerRow
from gpipe_bench.results.peer_rows import STEP_COLUMNS as PEER_STEP_COLUMNS
from gpipe_bench.results.rows import Row
from gpipe_bench.results.transparency_rows import GROUP, LAYER_COLUMNS, STEP_COLUMNS, VERDICT_COLUMNS, TransparencyRow
from gpipe_bench.results.transparency_rows import KEYS as RUN_KEYS

_GLOSSARY: Final = "columns.yaml"
ROWS_BESIDE: Final = ""
"""Target of a link: the table of rows that this one is a companion of."""

CONFIGURATIONS_BESIDE: Final = "_configurations"
"""Target of a link: the configurations of the same experiment."""


class Link(NamedTuple):
    """Columns by which every line leads to one or more lines of another table.

    Attributes:
        columns: here.
        target: path of the other table below the folder of results, :data:`ROWS_BESIDE` or
            :data:`CONFIGURATIONS_BESIDE`.
        others: their names there; empty where they are the same.
    """

    columns: tuple[str, ...]
    target: str = ROWS_BESIDE
    others: tuple[str, ...] = ()


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
        links: to the tables that say more of each line, such as its provenance.
    """

    name: str
    title: str
    text: str
    columns: tuple[str, ...]
    key: tuple[str, ...] = ()
    records: type[Row | TransparencyRow | PeerRow] | None = None
    links: tuple[Link, ...] = ()


_PUBLISHED: Final = (
    *("evidence", "source", "table", "experiment", "model", "model_args", "partitions", "chunks"),
    *("metric", "value", "unit", "status", "notes"),
)
_SETTINGS: Final = (
    *("evidence", "table", "experiment", "model", "model_args", "partitions", "chunks", "checkpoint", "batch_size"),
    *("balance", "microbatches", "microbatch_size", "last_microbatch_size", "full_steps", "rest_batch_size"),
    *("optimizer", "loss", "notes"),
)
_PREDICTIONS: Final = (
    *("table", "experiment", "metric", "published", "simulated", "error_fraction", "role"),
    *("evidence", "profile", "commit", "dirty", "config_sha256", "schema_version"),
)
_PRINTED: Final = "published/published.csv"
_RUN: Final = ("cell", "repeat")
_RACED: Final = ("case", "contender")
_CONFIGURED: Final = Link(("config_sha256",), CONFIGURATIONS_BESIDE)
_OF_RUN: Final = (Link(_RUN),)
_OF_TRAINING: Final = (Link(RUN_KEYS),)

KINDS: Final = (
    TableKind("rows", "Rows", "one repeat of one cell", Row.columns(), _RUN, Row, (_CONFIGURED,)),
    TableKind(
        *("configurations", "Configurations", "all settings of some rows, and their digest", CONFIGURATION_COLUMNS),
        key=("config_sha256",),
    ),
    TableKind(
        *("devices", "Partitions", "one partition of one repeat of a cell", tuple(COMPANIONS["devices"])),
        key=(*_RUN, "partition"),
        links=_OF_RUN,
    ),
    TableKind(
        *("steps", "Steps", "one timed step of one repeat of a cell", tuple(COMPANIONS["steps"])),
        key=(*_RUN, "step"),
        links=_OF_RUN,
    ),
    TableKind("events", "Timelines", "one task of one step of a cell", tuple(COMPANIONS["events"]), links=_OF_RUN),
    TableKind(
        *("published", "Printed values", "one printed value", _PUBLISHED),
        key=("source", "table", "experiment", "model_args", "metric"),
    ),
    TableKind(
        *("settings", "Settings", "how one published cell was run", _SETTINGS),
        key=("table", "experiment"),
        links=(Link(("table", "experiment"), _PRINTED),),
    ),
    TableKind(
        *("predictions", "Predictions", "one published cell and what the simulator says of it", _PREDICTIONS),
        key=("table", "experiment", "metric"),
        links=(Link(("table", "experiment", "metric"), _PRINTED), _CONFIGURED),
    ),
    TableKind(
        *("transparency", "Training", "one training run", TransparencyRow.columns(), RUN_KEYS, TransparencyRow),
        links=(_CONFIGURED,),
    ),
    TableKind(
        *("transparency-steps", "Training by step", "one step of a training run", STEP_COLUMNS),
        key=(*RUN_KEYS, "step"),
        links=_OF_TRAINING,
    ),
    TableKind(
        *("transparency-layers", "Training by layer", "one batch normalisation of a training run", LAYER_COLUMNS),
        key=(*RUN_KEYS, "step", "layer"),
        links=_OF_TRAINING,
    ),
    TableKind(
        *("transparency-verdicts", "Verdicts", "one claim over seeds", VERDICT_COLUMNS),
        key=(*GROUP, "quantity", "reference"),
        links=(Link(GROUP), _CONFIGURED),
    ),
    TableKind("peers", "Race", "one contender on one workload", PeerRow.columns(), _RACED, PeerRow, (_CONFIGURED,)),
    TableKind(
        *("peers-steps", "Race by step", "one timed step of a contender", PEER_STEP_COLUMNS),
        key=(*_RACED, "round", "step"),
        links=(Link(_RACED),),
    ),
    TableKind(
        *("peers-ratios", "Race by pair", "one contender and one baseline on one workload", RATIO_COLUMNS),
        key=(*_RACED, "baseline"),
        links=(Link(_RACED), Link(("case", "baseline"), others=_RACED)),
    ),
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
    advice = f"make the table anew, or describe its columns in {_GLOSSARY}"
    raise ConfigError([f"columns of {path} must be those of a known kind of table, {found}; {advice}"])
