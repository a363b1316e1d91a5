"""Names and columns of the tables beside the rows of an experiment: devices, steps and timeline events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS, configuration_records
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import csv_text

COMPANIONS: Final[Mapping[str, Sequence[str]]] = {name: TABLES[name].columns for name in ("devices", "steps", "events")}
"""Columns of the tables beside ``<experiment>.csv``."""


def companion_path(rows: Path, name: str) -> Path:
    """Where a companion of the table at ``rows`` lies: ``ablation.csv`` -> ``ablation_steps.csv``."""
    return rows.with_name(f"{rows.stem}_{name}{rows.suffix}")


def configurations_beside(rows: Path, configurations: Iterable[str]) -> dict[Path, str]:
    """The companion of the table at ``rows`` that has its configurations, none twice: its path and text."""
    text = csv_text(CONFIGURATION_COLUMNS, configuration_records(configurations))
    return {companion_path(rows, CONFIGURATIONS): text}
