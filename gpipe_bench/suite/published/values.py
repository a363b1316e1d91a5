"""Published values as rows: what benchmarks print, with the settings they were taken at.

The values and settings are data, ``results/reference/published``; here they get the columns of every other row, so that
a published, a simulated and a measured value of one cell stand side by side.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.components import PUBLISHED, Components
from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.machine.profile import load_profile
from gpipe_bench.models.table import MODELS, format_arguments, parse_arguments
from gpipe_bench.results.outcomes import printed_beside
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import plain_records
from gpipe_bench.simulator.published.settings import published_tables

if TYPE_CHECKING:
    import pandas as pd

# Every other benchmark of torchgpipe ran with all of its components.
_COMPLETE: Final = PUBLISHED[-1]
_RESERVED: Final = "peak_reserved_gib"
# Where memory was printed in two parts, their sum is what the allocators held.
_PARTS: Final = ("model_memory_gib", "activation_memory_gib")


def published_rows(folder: Path = PUBLISHED_FOLDER) -> list[Row]:
    """A row for each published line with known settings that prints a throughput, a memory or a utilisation.

    Rows do not say their precision, so there is none for a line in half precision.

    Args:
        folder: holds ``published.csv`` and ``settings.csv``.

    Raises:
        ConfigError: see :func:`gpipe_bench.simulator.published.settings.published_tables`.
    """
    values, settings = published_tables(folder)
    metrics = [column.name for column in fields(Row) if str(column.type).startswith("float")]
    values = values.assign(column=values["metric"].replace(dict.fromkeys(_PARTS, _RESERVED)))
    values = values[values["column"].isin(metrics)]
    rows = []
    for line in plain_records(settings[settings["precision"] == "float32"]):
        own = values[(values["table"] == line["table"]) & (values["experiment"] == line["experiment"])]
        if len(own):
            rows.append(replace(_row(line), source=own["source"].iloc[0], **_results(own)))
    return rows


def _results(values: pd.DataFrame) -> dict[str, Any]:
    """The columns of one cell; a row that failed has no results, whatever part of it was printed."""
    failed = values[values["status"] != "ok"]
    if len(failed):
        metric, status = failed[["metric", "status"]].iloc[-1]
        return {"status": status, "reason": f"{metric} was published as {status}"}
    return {str(name): value for name, value in values.groupby("column")["value"].sum().items()}


def published_for(rows: Iterable[Row], folder: Path = PUBLISHED_FOLDER) -> list[Row]:
    """The published rows of the settings that occur in ``rows``, whatever the devices; none twice.

    Raises:
        ConfigError: see :func:`published_rows`.
    """
    return printed_beside(rows, published_rows(folder))


def _row(line: dict[str, Any]) -> Row:
    label = line["experiment"] if line["experiment"] in PUBLISHED and line["table"] == "ablation" else _COMPLETE
    components = Components.from_label(label)
    model, arguments, balance = line["model"], line["model_args"], line["balance"]
    if model in MODELS:
        known = parse_arguments(model, arguments)
        # A model that was not cut is one partition of all of its layers.
        arguments, balance = format_arguments(known), balance or str(MODELS[model].layers(known))
    return Row(
        experiment=line["table"],
        evidence="published",
        model=model,
        model_args=arguments,
        variant=label,
        partitions=line["partitions"],
        chunks=line["chunks"],
        microbatches=line["microbatches"],
        checkpoint=line["checkpoint"],
        batch_size=line["batch_size"],
        balance=balance,
        device=f"cuda {load_profile(line['profile']).device}",
        device_count=line["partitions"],
        schedule=line["schedule"] or "gpipe",
        **{name: getattr(components, name) for name in Components.switched()},
    )
