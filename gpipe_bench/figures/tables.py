"""Rows and events of result tables, as objects; :mod:`gpipe_bench.results.tables` reads and checks the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpipe_bench.errors import ConfigError
from gpipe_bench.results.peer_rows import PeerRow
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import header_of, plain_records, read_records, read_table
from gpipe_bench.results.timeline import TimelineEvent

NEEDED: Final = (
    *("evidence", "model", "model_args", "variant", "partitions", "chunks", "checkpoint", "batch_size", "balance"),
    *("repeat", "status", "reason", "throughput_samples_per_s", "step_time_ms", "peak_allocated_gib"),
    *("peak_reserved_gib", "bubble_fraction", "copy_fraction", "recompute_fraction", "imbalance_fraction", "device"),
)
"""Columns of rows that figures read."""

_EVENT_KEYS: Final = ("cell", "variant", "repeat", "evidence")
_PEER_KEYS: Final = ("evidence", "workload", "contender", "model", "variant", "partitions", "chunks", "checkpoint")


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """A timeline event and the run that it belongs to."""

    cell: str
    variant: str
    repeat: int
    evidence: str
    event: TimelineEvent


def read_rows(path: Path, needed: Sequence[str] = NEEDED) -> list[Row]:
    """The rows of a result table.

    Args:
        path: a CSV file.
        needed: columns that must be there.

    Raises:
        ConfigError: as :func:`gpipe_bench.results.tables.read_table`.
    """
    return read_records(path, needed, Row)


def read_peers(path: Path) -> list[PeerRow]:
    """The rows of a table of the race of peers.

    Raises:
        ConfigError: as :func:`read_rows`.
    """
    needed = (*_PEER_KEYS, "status", "throughput_samples_per_s", "host_time_per_cell_us")
    return read_records(path, needed, PeerRow)


def is_race(path: Path) -> bool:
    """Whether a table is one of the race of peers: most of its columns are those of other rows, contenders are not."""
    return {"contender", "workload"} <= set(header_of(path))


def read_events(path: Path) -> list[RecordedEvent]:
    """The events of a timeline table.

    Raises:
        ConfigError: as :func:`read_rows`, or an event ends before it starts.
    """
    columns = (*_EVENT_KEYS, *TimelineEvent.columns())
    table = read_table(path, columns, given=[name for name in columns if name not in ("variant", "device")])
    if len(wrong := table[table.end_us < table.start_us]):
        line, first = int(wrong.index[0]), wrong.iloc[0]
        rule = f"{path}, line {line + 2}: end_us must not be earlier than start_us"
        raise ConfigError([f"{rule}, got {first.start_us} to {first.end_us}; record the step again"])
    keys, events = plain_records(table[[*_EVENT_KEYS]]), plain_records(table[[*TimelineEvent.columns()]])
    return [RecordedEvent(**key, event=TimelineEvent(**event)) for key, event in zip(keys, events, strict=True)]
