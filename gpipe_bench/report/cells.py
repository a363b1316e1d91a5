"""Rows of an experiment as tables: a line per cell, with medians and intervals over its repeats."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from gpipe_bench.figures.groups import short_reason
from gpipe_bench.figures.text import TIMES
from gpipe_bench.report.tables import Field, PageTable, number_words
from gpipe_bench.results.intervals import median_interval, ratio_interval
from gpipe_bench.results.labels import LOOP
from gpipe_bench.results.outcomes import way_of
from gpipe_bench.results.rows import EVIDENCE, Row

_APART: Final = ("evidence", "model", "flavour")
_MACHINE: Final = ("device", "profile")
_KEYS: Final = (
    *("model_args", "variant", "partitions", "chunks", "microbatches", "checkpoint", "batch_size", "balance"),
    *("backward", "schedule", "transfer", "device_count", "processes", "hosts"),
)
_SETTING: Final = (
    *("model", "model_args", "variant", "schedule", "partitions", "chunks", "checkpoint", "batch_size", "device"),
)
_SPEED: Final = "throughput_samples_per_s"
_METRICS: Final = {
    _SPEED: ("samples/s", 1.0),
    "peak_allocated_gib": ("live GiB", 1.0),
    "peak_reserved_gib": ("reserved GiB", 1.0),
    "utilization_fraction": ("busy %", 100.0),
    "bubble_fraction": ("bubble %", 100.0),
    "ideal_bubble": ("ideal bubble %", 100.0),
    "imbalance_fraction": ("imbalance %", 100.0),
    "copy_fraction": ("copy %", 100.0),
    "recompute_fraction": ("recompute %", 100.0),
}
_BASELINE: Final = "baseline"

Cell = Sequence[Row]
Column = tuple[str, Callable[[Cell], Field]]


def cell_tables(rows: Sequence[Row]) -> list[PageTable]:
    """A table per kind of evidence, model and machine, published before simulated, emulated and measured.

    Where a published row has the same setting and hardware, the difference from it stands beside the value.
    """
    groups: dict[tuple[object, ...], list[Row]] = {}
    # A run that failed may not have learnt its machine's full name: it joins every table of its model.
    for row in sorted(rows, key=lambda row: row.status != "ok"):
        key = tuple(getattr(row, name) for name in (*_APART, *_MACHINE))
        homes = [known for known in groups if known[: len(_APART)] == key[: len(_APART)]]
        if row.status == "ok" or not homes:
            homes = [key]
        for home in homes:
            groups.setdefault(home, []).append(row)
    ordered = sorted(groups.values(), key=lambda members: EVIDENCE.index(members[0].evidence))
    printed = {_setting(row): row for row in rows if row.evidence == "published" and row.status == "ok"}
    return [_table(members, printed) for members in ordered]


def _setting(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in _SETTING)


def _table(rows: Sequence[Row], printed: Mapping[tuple[object, ...], Row]) -> PageTable:
    shown = [name for name in _KEYS if len({getattr(row, name) for row in rows}) > 1] or ["variant"]
    if all(row.device_count == row.partitions for row in rows):
        shown = [name for name in shown if name != "device_count"]
    if all(row.microbatches == row.chunks for row in rows):
        shown = [name for name in shown if name != "microbatches"]
    cells: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        cells.setdefault(tuple(getattr(row, name) for name in shown), []).append(row)
    reasons: dict[str, int] = {}
    columns = [*_value_columns(rows, printed), *_baseline_column(rows, shown, cells), _status_column(reasons)]
    common = _common(rows)
    lines = [
        [*(_key(value, common) for value in key), *(field(members) for _, field in columns)]
        for key, members in cells.items()
    ]
    header = [*(name.replace("_", " ") for name in shown), *(name for name, _ in columns)]
    notes = [f"[{number}] {reason}" for reason, number in reasons.items()]
    return PageTable(_title(rows[0], shown, common), rows[0].evidence, header, lines, notes=notes, keys=len(shown))


def _common(rows: Sequence[Row]) -> list[str]:
    """The arguments of the model that all rows have."""
    return [part for part in rows[0].model_args.split(";") if all(part in row.model_args.split(";") for row in rows)]


def _title(row: Row, shown: Sequence[str], common: Sequence[str]) -> str:
    machine = row.profile if row.evidence in ("simulated", "emulated") else row.device or row.profile
    counts = {name: getattr(row, name) for name in ("partitions", "chunks") if name not in shown}
    facts = [f"{count} {name if count != 1 else name.removesuffix('s')}" for name, count in counts.items()]
    facts += [f"batch {row.batch_size}"] if "batch_size" not in shown else []
    facts += [f"checkpoint {row.checkpoint}"] if "checkpoint" not in shown else []
    flavour = ", autograd of PyTorch 1.3" if row.flavour == "published" else ""
    model = f"{row.model} ({', '.join(common)}) on {machine}{flavour}"
    return f"{model}; {', '.join(facts)}" if facts else model


def _value_columns(rows: Sequence[Row], printed: Mapping[tuple[object, ...], Row]) -> list[Column]:
    """How many repeats, then every metric that a row has, each with its difference from print where there is one."""
    columns: list[Column] = []
    if rows[0].evidence in ("measured", "emulated"):
        columns.append(("n", _count))
    others = [printed.get(_setting(row)) for row in rows] if rows[0].evidence != "published" else []
    for name, (words, _) in _METRICS.items():
        # The ideal stands beside a bubble that was found.
        source = "bubble_fraction" if name == "ideal_bubble" else name
        if any(getattr(row, source) is not None for row in rows):
            columns.append((words, partial(_metric, name=name)))
            if any(other is not None and getattr(other, source) is not None for other in others):
                columns.append(("vs print", partial(_error, name=name, printed=printed)))
    return columns


def _baseline_column(
    rows: Sequence[Row], shown: Sequence[str], cells: Mapping[tuple[object, ...], Cell]
) -> list[Column]:
    """Throughput over that of the plain loop, or of the same setting without any component, where the table has it."""
    loop = [row for row in rows if way_of(row) == LOOP]
    if loop:
        base = _values(loop, _SPEED)
        return [(f"{TIMES} {LOOP}", lambda cell: _ratio([] if cell[0] in loop else _values(cell, _SPEED), base))]
    if "variant" not in shown or not any(row.variant == _BASELINE and row.status == "ok" for row in rows):
        return []

    def field(cell: Cell) -> Field:
        key = tuple(_BASELINE if name == "variant" else getattr(cell[0], name) for name in shown)
        base = cells.get(key, ()) if cell[0].variant != _BASELINE else ()
        return _ratio(_values(cell, _SPEED), _values(base, _SPEED))

    return [(f"{TIMES} baseline", field)]


def _status_column(reasons: dict[str, int]) -> Column:
    """The statuses of a cell; reasons get numbers, in the order in which they occur."""

    def field(cell: Cell) -> Field:
        words = ["ok"] if any(row.status == "ok" for row in cell) else []
        found = []
        for row in cell:
            if row.status != "ok":
                found.append(short_reason(row.reason, 200))
                words.append(f"{row.status} [{reasons.setdefault(found[-1], len(reasons) + 1)}]")
        return Field(", ".join(dict.fromkeys(words)), more="; ".join(dict.fromkeys(found)))

    return ("status", field)


def _values(cell: Cell, name: str) -> list[float]:
    found = [getattr(row, name) for row in cell if row.status == "ok"]
    return [float(value) for value in found if value is not None]


def _count(cell: Cell) -> Field:
    good = sum(row.status == "ok" for row in cell)
    return Field(str(good), float(good))


def _metric(cell: Cell, name: str) -> Field:
    values = _values(cell, name)
    if not values:
        return Field("")
    scale, middle = _METRICS[name][1], median_interval(values)
    text = number_words(scale * middle.median)
    if name == _SPEED and not math.isnan(middle.low):
        text += f" [{number_words(scale * middle.low)}, {number_words(scale * middle.high)}]"
    return Field(text, scale * middle.median)


def _error(cell: Cell, name: str, printed: Mapping[tuple[object, ...], Row]) -> Field:
    other = printed.get(_setting(cell[0]))
    base, values = getattr(other, name, None), _values(cell, name)
    if not base or not values:
        return Field("")
    error = median_interval(values).median / base - 1
    return Field(f"{error:+.1%}", error)


def _ratio(values: Sequence[float], base: Sequence[float]) -> Field:
    if not values or not base:
        return Field("")
    ratio = ratio_interval(values, base)
    interval = "" if math.isnan(ratio.low) else f" [{ratio.low:.2f}, {ratio.high:.2f}]"
    return Field(f"{ratio.median:.2f}{interval}", ratio.median)


def _key(value: object, common: Sequence[str]) -> Field:
    """A setting of a cell; of the model's arguments those in which cells differ."""
    if isinstance(value, str):
        return Field(", ".join(part for part in value.split(";") if part not in common))
    return Field("" if value is None else str(value), float(value) if isinstance(value, int) else None)
