"""Rows of the race of peers as tables: a line per contender and setting, a table per workload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from gpipe_bench.figures.groups import short_reason
from gpipe_bench.report.tables import Field, PageTable, number_words
from gpipe_bench.results.peer_rows import TINY, PeerRow

_KEYS: Final = ("model_args", "partitions", "chunks", "batch_size", "checkpoint", "variant")
_METRICS: Final[Mapping[str, str]] = {
    "host_time_per_cell_us": "host us per cell",
    "throughput_samples_per_s": "samples/s",
    "step_time_ms": "step ms",
    "cpu_time_ms": "CPU ms",
    "peak_live_mib": "live MiB",
    "forward_passes": "forward passes",
    "limit_ms": "limit ms",
}

Column = tuple[str, Callable[[PeerRow], Field]]


def peer_tables(rows: Sequence[PeerRow]) -> list[PageTable]:
    """A table per workload and machine; in each, no two contenders share a line."""
    groups: dict[tuple[str, str, str], list[PeerRow]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.device, row.profile), []).append(row)
    return [_table(members) for members in groups.values()]


def _table(rows: Sequence[PeerRow]) -> PageTable:
    shown = [name for name in _KEYS if len({getattr(row, name) for row in rows}) > 1]
    reasons: dict[str, int] = {}
    columns: list[Column] = [*_columns(rows), ("gradients", _gradients), ("status", partial(_status, reasons))]
    lines = [
        [*(_key(getattr(row, name)) for name in ("contender", *shown)), *(field(row) for _, field in columns)]
        for row in rows
    ]
    header = [*(name.replace("_", " ") for name in ("contender", *shown)), *(name for name, _ in columns)]
    notes = [f"[{number}] {reason}" for reason, number in reasons.items()]
    return PageTable(_title(rows[0], shown), rows[0].evidence, header, lines, notes=notes, keys=1 + len(shown))


def _title(row: PeerRow, shown: Sequence[str]) -> str:
    setting = [f"{getattr(row, name)} {name}" for name in ("partitions", "chunks") if name not in shown]
    setting += [f"checkpoint {row.checkpoint}"] if "checkpoint" not in shown else []
    model = f"{row.model} ({row.model_args})" if "model_args" not in shown else row.model
    what = ["tiny layers", row.workload] if row.workload in TINY else [row.workload]
    return "; ".join([f"{', '.join(what)}: {model} on {row.device or row.profile}", *setting])


def _columns(rows: Sequence[PeerRow]) -> list[Column]:
    """Every metric that a row has, then the ratio to the baseline of the workload."""
    found: list[Column] = [
        (words, partial(_metric, name))
        for name, words in _METRICS.items()
        if any(getattr(row, name) is not None for row in rows)
    ]
    if baselines := sorted({row.baseline for row in rows if row.baseline}):
        found.append((f"over {', '.join(baselines)}", _ratio))
    return found


def _metric(name: str, row: PeerRow) -> Field:
    value = getattr(row, name)
    return Field("") if value is None else Field(number_words(value), value)


def _ratio(row: PeerRow) -> Field:
    if row.ratio is None:
        return Field("")
    low, high = (math.nan if end is None else end for end in (row.ratio_low, row.ratio_high))
    interval = "" if math.isnan(low) or low == high else f" [{low:.2f}, {high:.2f}]"
    return Field(f"{row.ratio:.2f}{interval}", row.ratio)


def _gradients(row: PeerRow) -> Field:
    return Field(row.gradients)


def _status(reasons: dict[str, int], row: PeerRow) -> Field:
    if row.status == "ok":
        return Field("ok")
    reason = short_reason(row.reason, 200)
    return Field(f"{row.status} [{reasons.setdefault(reason, len(reasons) + 1)}]", more=reason)


def _key(value: object) -> Field:
    return Field("" if value is None else str(value), float(value) if isinstance(value, int) else None)
