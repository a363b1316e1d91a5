"""Published values as rows: what torchgpipe's benchmarks print, with the settings they were taken at.

The values and settings are data, ``results/reference/published``; here they get the columns of every other row, so that
a published, a simulated and a measured value of one cell stand side by side.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import MODELS, format_arguments, parse_arguments
from gpipe_bench.rows import Row

__all__ = ["PUBLISHED_FOLDER", "published_for", "published_rows"]

PUBLISHED_FOLDER: Final = Path(__file__).resolve().parents[3] / "results" / "reference" / "published"

_DEVICE: Final = "cuda Tesla P40"
# Every other benchmark of torchgpipe ran with all of its components.
_COMPLETE: Final = PUBLISHED[-1]
_RESERVED: Final = "peak_reserved_gib"
# Where memory was printed in two parts, their sum is what the allocators held.
_PARTS: Final = ("model_memory_gib", "activation_memory_gib")
_SETTING: Final = ("model", "model_args", "variant", "partitions", "chunks", "checkpoint", "batch_size", "balance")


def published_rows(folder: Path = PUBLISHED_FOLDER) -> list[Row]:
    """A row for each line of torchgpipe's benchmarks that prints a throughput, a memory or a utilisation.

    Args:
        folder: holds ``published.csv`` and ``settings.csv``.

    Raises:
        ConfigError: a file cannot be read or lacks a column.
    """
    metrics = {column.name for column in fields(Row) if str(column.type).startswith("float")}
    try:
        values: dict[tuple[str, str], dict[str, Any]] = {}
        for line in _lines(folder / "published.csv"):
            metric = _RESERVED if line["metric"] in _PARTS else line["metric"]
            if metric in metrics and line["source"].startswith("torchgpipe:benchmarks"):
                facts = values.setdefault((line["table"], line["experiment"]), {"source": line["source"]})
                before = facts.get(metric, 0.0) if line["metric"] in _PARTS else 0.0
                facts |= {metric: before + float(line["value"])} if line["status"] == "ok" else _failure(line)
        lines = [line for line in _lines(folder / "settings.csv") if (line["table"], line["experiment"]) in values]
        return [_row(line, values[line["table"], line["experiment"]]) for line in lines]
    except (OSError, KeyError, ValueError) as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            [f"published values must be two CSV files, got {reason} in {folder}; restore the folder"]
        ) from error


def published_for(rows: Iterable[Row], folder: Path = PUBLISHED_FOLDER) -> list[Row]:
    """The published rows of the settings that occur in ``rows``, whatever the devices; none twice.

    Raises:
        ConfigError: see :func:`published_rows`.
    """
    asked = {_setting(row) for row in rows}
    return [row for row in published_rows(folder) if _setting(row) in asked]


def _lines(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _failure(line: dict[str, str]) -> dict[str, Any]:
    return {"status": line["status"], "reason": f"{line['metric']} was published as {line['status']}"}


def _row(line: dict[str, str], values: dict[str, Any]) -> Row:
    label = line["experiment"] if line["experiment"] in PUBLISHED and line["table"] == "ablation" else _COMPLETE
    components = Components.from_label(label)
    model, arguments = line["model"], line["model_args"]
    row = Row(
        experiment=line["table"],
        evidence="published",
        model=model,
        model_args=format_arguments(parse_arguments(model, arguments)) if model in MODELS else arguments,
        variant=label,
        partitions=int(line["partitions"]),
        chunks=int(line["chunks"]),
        microbatches=int(line["microbatches"]),
        checkpoint=line["checkpoint"],
        batch_size=int(line["batch_size"]),
        balance=line["balance"] or _one_partition(model, arguments),
        device=_DEVICE,
        device_count=int(line["partitions"]),
        **{name: getattr(components, name) for name in components.__slots__},
    )
    # A row that failed has no results, whatever part of it was printed.
    known = values if "status" not in values else {name: values[name] for name in ("source", "status", "reason")}
    return replace(row, **known)


def _one_partition(model: str, arguments: str) -> str:
    """The balance of a model that was not cut: all of its layers."""
    return str(MODELS[model].layers(parse_arguments(model, arguments))) if model in MODELS else ""


def _setting(row: Row) -> tuple[object, ...]:
    return tuple(getattr(row, name) for name in _SETTING)
