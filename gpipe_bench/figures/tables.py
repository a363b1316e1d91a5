"""Rows and events of result tables, as objects; :mod:`gpipe_bench.results.tables` reads and checks the files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.figures.base import Selection
from gpipe_bench.results.outcomes import printed_beside
from gpipe_bench.results.rows import EVIDENCE, PeerRow, Row
from gpipe_bench.results.tables import header_of, plain_records, read_records, read_table, read_text
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


def evidence_in(path: Path) -> list[str]:
    """The kinds of evidence that a table is of: published values stand beside others, and count if they are alone.

    A table that does not say it is of one kind without a name; reading its rows says what is wrong with it.
    """
    found = {*read_text(path).get("evidence", [])}
    return [kind for kind in EVIDENCE if kind in (found - {"published"} or found)] or [""]


def read_selected(path: Path, selection: Selection) -> list[Row]:
    """The rows of one kind of evidence.

    Raises:
        ConfigError: as :func:`read_rows`, or there is none.
    """
    rows = read_rows(path)
    asked = selection.evidence
    own = [row for row in rows if asked in ("", row.evidence)]
    if not own:
        known = ", ".join(dict.fromkeys(row.evidence for row in rows))
        raise ConfigError([f"evidence must be of a kind that the rows have, got {asked!r}; use one of {known}"])
    return own


def read_beside(path: Path, selection: Selection) -> list[Row]:
    """The rows of one kind of evidence, after those that they are compared with.

    These are the published rows of the same settings, those of the table or else of the reference results; and beside
    emulated rows the simulated ones of today's autograd engine, from the table or from that of the same hardware.
    Simulated rows of two flavours are those of the autograd engine of print.
    """
    own = read_selected(path, selection)
    if (kind := own[0].evidence) == "published":
        return own
    table = read_rows(path)
    twins: list[Row] = []
    if kind == "emulated":
        folder = path.resolve().parent
        other = folder.parent.parent / "simulated" / folder.name / path.name
        twins = [row for row in table if row.evidence == "simulated"]
        twins = twins or (read_rows(other) if other.is_file() else [])
        twins = of_flavour(twins, "current")
    elif kind == "simulated":
        own = of_flavour(own, "published")
    printed = [row for row in table if row.evidence == "published"] or read_rows(PUBLISHED_FOLDER / "rows.csv")
    return [*printed_beside(own, printed), *twins, *own]


def of_flavour(rows: Sequence[Row], flavour: str) -> list[Row]:
    """Rows of one flavour, where there are two."""
    two = len({row.flavour for row in rows}) > 1
    return [row for row in rows if not two or row.flavour == flavour]


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
