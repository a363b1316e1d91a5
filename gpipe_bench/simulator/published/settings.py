"""The published rows and how each was run, from ``results/reference/published``."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from gpipe_bench.data import PUBLISHED_FOLDER
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import model_spec, parse_arguments
from gpipe_bench.results.configurations import canonical
from gpipe_bench.results.tables import plain_records, read_table
from gpipe_bench.util.nearest import nearest

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class PublishedSetting:
    """How a published row was run.

    Attributes:
        table: benchmark.
        experiment: row.
        model: its name.
        model_args: as ``key=value`` joined by ``;``.
        partitions: n.
        chunks: micro-batches asked for.
        checkpoint: mode.
        batch_size: samples of a mini-batch.
        balance: layers per partition, joined by ``-``; empty for a model that was not partitioned.
        full_steps: steps of an epoch with a whole mini-batch; 0 where no speed was measured.
        rest_batch_size: samples of the last, smaller mini-batch of an epoch; 0 for none.
        schedule: its name; empty where autograd ordered the backward pass.
        optimizer: its name.
        precision: of weights, activations and gradients.
        profile: the hardware.
        flavour: autograd engine.
        memory: whether memory is simulated: not where a run shared or recomputed tensors as this engine does not.
        tflop_per_sample: work of a sample as the source counts it; None where it prints no utilisation of FLOPs.
        role: ``fitted`` if constants were fitted to its throughput; ``held_out`` if nobody had seen it while the
            simulator was made; ``transferred`` if its hardware has constants from elsewhere: from data sheets, other
            devices or runs of other models; else ``predicted``.
    """

    table: str
    experiment: str
    model: str
    model_args: str
    partitions: int
    chunks: int
    checkpoint: str
    batch_size: int
    balance: str
    full_steps: int
    rest_batch_size: int
    schedule: str
    optimizer: str
    precision: str
    profile: str
    flavour: str
    memory: bool
    tflop_per_sample: float | None
    role: str

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers per partition."""
        if self.balance:
            return tuple(int(count) for count in self.balance.split("-"))
        return (model_spec(self.model).layers(parse_arguments(self.model, self.model_args)),)

    @property
    def configuration(self) -> str:
        """All that decides its simulation; see :mod:`gpipe_bench.results.configurations`."""
        # What is usual is left out, so that settings keep their digests when a column is added.
        deciding = {name: getattr(self, name) for name in _SETTINGS if name not in _AFTERWARDS}
        return canonical({name: value for name, value in deciding.items() if _USUAL.get(name, ...) != value})


_SETTINGS: Final = tuple(column.name for column in fields(PublishedSetting))
_AFTERWARDS: Final = ("tflop_per_sample", "role")
_USUAL: Final = {"schedule": "", "precision": "float32", "memory": True}
_CELL: Final = ("table", "experiment")
_QUOTED: Final = ("torchgpipe:docs", "GPipe:")
_VALUE: Final = (*_CELL, "source", "metric", "model", "model_args", "partitions", "chunks")


@cache
def published_tables(folder: Path = PUBLISHED_FOLDER) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The values that are printed of the rows whose settings are known, and how each of these rows was run.

    Of a row of torchgpipe's, which others quote, these are the values that its own benchmarks print.

    Raises:
        ConfigError: a table cannot be read or is not whole.
    """
    needed = (*_CELL, "source", "metric", "value", "status")
    values = read_table(folder / "published.csv", needed, given=needed[:-2], key=_VALUE)
    settings = read_table(folder / "settings.csv", _SETTINGS, kind="settings", given=_SETTINGS[:4], key=_CELL)
    known = values.set_index([*_CELL]).index.isin(settings.set_index([*_CELL]).index)
    return values[known & ~values["source"].str.startswith(_QUOTED)], settings


@cache
def _records() -> dict[str, list[dict[str, Any]]]:
    """The lines of both tables as plain data."""
    values, settings = published_tables()
    settings = settings[[*_SETTINGS]].fillna({"full_steps": 0, "rest_batch_size": 0})
    return {"values": plain_records(values[[*_CELL, "metric", "value"]]), "settings": plain_records(settings)}


@cache
def published_settings() -> tuple[PublishedSetting, ...]:
    """All rows whose settings are known.

    Raises:
        ConfigError: as :func:`published_tables`.
    """
    return tuple(PublishedSetting(**line) for line in _records()["settings"])


def settings_of(table: str) -> list[PublishedSetting]:
    """The rows of a published table.

    Raises:
        ConfigError: there is no such table.
    """
    known = list(dict.fromkeys(setting.table for setting in published_settings()))
    if table not in known:
        raise ConfigError([f"table must be one of {', '.join(known)}, got {table!r}; {nearest(table, known)}"])
    return [setting for setting in published_settings() if setting.table == table]


def published_cells(row: PublishedSetting) -> dict[str, float | None]:
    """What is printed for a row: metric -> value, None for out of memory."""
    cell = (row.table, row.experiment)
    return {
        line["metric"]: line["value"] for line in _records()["values"] if (line["table"], line["experiment"]) == cell
    }


def published_value(row: PublishedSetting, metric: str) -> float:
    """The value that is printed for a row.

    Raises:
        KeyError: there is none.
    """
    value = published_cells(row)[metric]
    if value is None:
        raise KeyError(metric)
    return value
