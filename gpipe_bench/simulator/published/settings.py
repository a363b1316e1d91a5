"""The published rows and how each was run, from ``results/reference/published``."""

from __future__ import annotations

import csv
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Final

from gpipe_bench.configurations import canonical

__all__ = ["PUBLISHED_FOLDER", "Setting", "published_cells", "published_settings", "published_value"]

PUBLISHED_FOLDER: Final = Path(__file__).resolve().parents[3] / "results" / "reference" / "published"


_UNCUT: Final = (10**6,)
"""Layers of a model that was not partitioned: more than it has."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a published row was run.

    Attributes:
        table: benchmark.
        experiment: row.
        model: its name; ``resnet101`` is in no table of models.
        model_args: as ``key=value`` joined by ``;``.
        partitions: n.
        chunks: micro-batches asked for.
        checkpoint: mode.
        batch_size: samples of a mini-batch.
        balance: layers per partition; one number too large for a model that was not partitioned.
        full_steps: steps of an epoch with a whole mini-batch; 0 where no speed was measured.
        rest_batch_size: samples of the last, smaller mini-batch of an epoch; 0 for none.
        optimizer: its name.
    """

    table: str
    experiment: str
    model: str
    model_args: str
    partitions: int
    chunks: int
    checkpoint: str
    batch_size: int
    balance: tuple[int, ...]
    full_steps: int
    rest_batch_size: int
    optimizer: str

    def model_arguments(self) -> dict[str, str]:
        """Arguments of the model as text."""
        return dict(pair.split("=", 1) for pair in self.model_args.split(";"))

    def configuration(self, profile: str) -> str:
        """All that decides its simulation on a hardware profile; see :mod:`gpipe_bench.configurations`."""
        balance = "" if self.balance == _UNCUT else "-".join(map(str, self.balance))
        return canonical({**asdict(self), "balance": balance, "profile": profile, "flavour": "published"})


@cache
def published_settings(folder: Path = PUBLISHED_FOLDER) -> tuple[Setting, ...]:
    """All rows of torchgpipe's benchmarks."""
    with (folder / "settings.csv").open(encoding="utf-8", newline="") as file:
        return tuple(
            Setting(
                table=row["table"],
                experiment=row["experiment"],
                model=row["model"],
                model_args=row["model_args"],
                partitions=int(row["partitions"]),
                chunks=int(row["chunks"]),
                checkpoint=row["checkpoint"],
                batch_size=int(row["batch_size"]),
                balance=tuple(int(count) for count in row["balance"].split("-")) if row["balance"] else _UNCUT,
                full_steps=int(row["full_steps"] or 0),
                rest_batch_size=int(row["rest_batch_size"] or 0),
                optimizer=row["optimizer"],
            )
            for row in csv.DictReader(file)
        )


@cache
def _values(folder: Path) -> dict[tuple[str, str], dict[str, float | None]]:
    found: dict[tuple[str, str], dict[str, float | None]] = {}
    with (folder / "published.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["source"].startswith("torchgpipe:benchmarks"):
                value = float(row["value"]) if row["value"] else None
                found.setdefault((row["table"], row["experiment"]), {})[row["metric"]] = value
    return found


def published_cells(row: Setting, folder: Path = PUBLISHED_FOLDER) -> dict[str, float | None]:
    """What torchgpipe's benchmarks print for a row: metric -> value, None for out of memory."""
    return dict(_values(folder).get((row.table, row.experiment), {}))


def published_value(row: Setting, metric: str, folder: Path = PUBLISHED_FOLDER) -> float:
    """The value that torchgpipe's benchmarks print for a row.

    Raises:
        KeyError: it prints none.
    """
    value = published_cells(row, folder)[metric]
    if value is None:
        raise KeyError(metric)
    return value
