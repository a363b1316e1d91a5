"""CSV tables of an experiment: rows, and companions for devices, steps and timeline events.

Plain text in, plain text out: ``True`` and ``False``, empty for what is not known, numbers in the shortest form that
reads back to the same bits. :mod:`gpipe_bench.figures.tables` reads them with the types of the schema.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from gpipe_bench.bench.storage.raw import DEVICE_COLUMNS, STEP_COLUMNS
from gpipe_bench.timeline import TimelineEvent

__all__ = ["COMPANIONS", "companion_path", "csv_text"]

COMPANIONS: Final[Mapping[str, Sequence[str]]] = {
    "devices": ("cell", "variant", "repeat", *DEVICE_COLUMNS),
    "steps": ("cell", "variant", "repeat", *STEP_COLUMNS),
    "events": ("cell", "variant", "repeat", "evidence", *TimelineEvent.columns()),
}
"""Columns of the tables beside ``<experiment>.csv``."""


def companion_path(rows: Path, name: str) -> Path:
    """Where a companion of the table at ``rows`` lies: ``ablation.csv`` -> ``ablation_steps.csv``."""
    return rows.with_name(f"{rows.stem}_{name}{rows.suffix}")


def csv_text(columns: Sequence[str], records: Iterable[Mapping[str, Any]]) -> str:
    """The table as text; None becomes an empty field."""
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return buffer.getvalue()
