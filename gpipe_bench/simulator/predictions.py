"""Every published throughput, memory and utilisation of the eight P40s, beside what the simulator says of it.

    gpipe-bench predictions --out results/predictions.csv

writes a row per published cell and prints the table and its mean error. In the file a cell without a number ran out of
memory; then it has no error either, and the printed table says which of the two ran out. Beside it lies
``predictions_configurations.csv``: how the cell of each row was run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS, configuration_records, digest
from gpipe_bench.results.rows import SCHEMA_VERSION
from gpipe_bench.results.tables import lines_text
from gpipe_bench.simulator.published.runs import METRICS, PublishedRuns, is_fitted, is_held_out
from gpipe_bench.simulator.published.settings import Setting, published_cells, published_settings
from gpipe_bench.util.checkout import checkout
from gpipe_bench.util.collection import no_collection
from gpipe_bench.util.files import write_files

COLUMNS: Final = (
    *("table", "experiment", "metric", "published", "simulated", "error_fraction", "role"),
    *("evidence", "profile", "commit", "dirty", "config_sha256", "schema_version"),
)

TABLES: Final = (
    "ablation",
    "unet-speed",
    "amoebanet-d-speed",
    "unet-memory",
    "amoebanet-d-memory",
    "resnet101-speed",
)
"""In the order of the rows."""

_PROFILE: Final = "p40"
_FITTED: Final = "fitted"
_PREDICTED: Final = "predicted"
_HELD_OUT: Final = "held_out"
_THROUGHPUT: Final = "throughput_samples_per_s"
_COUNTED: Final = "model_memory_gib"


@dataclass(frozen=True, slots=True)
class Prediction:
    """A published cell.

    Attributes:
        table: benchmark.
        experiment: row of the benchmark.
        metric: the quantity, with its unit.
        published: its value; None for out of memory.
        simulated: the simulator's value; None for out of memory.
        role: ``fitted`` if constants were fitted to it; ``held_out`` if nobody had seen it while the simulator was
            made; else ``predicted``.
        reason: how the simulation ran out of memory; not in the file.
        configuration: how the cell was run; in the file as its digest.
    """

    table: str
    experiment: str
    metric: str
    published: float | None
    simulated: float | None
    role: str
    reason: str = ""
    configuration: str = ""

    @property
    def error_fraction(self) -> float | None:
        """Simulated over published, minus 1; None where one of them ran out of memory."""
        if self.published is None or self.simulated is None:
            return None
        return self.simulated / self.published - 1

    @property
    def status(self) -> str:
        """``ok``, ``agreed`` where both ran out of memory, ``missed`` where one did."""
        if self.error_fraction is not None:
            return "ok"
        return "agreed" if self.published is self.simulated else "missed"


def predictions(tables: Sequence[str] = TABLES, cache: Path | None = None) -> Iterator[Prediction]:
    """Simulate the published cells of some tables, one after the other; ``cache``: folder of stored traces."""
    runs = PublishedRuns(_PROFILE, cache)
    for table in tables:
        for row in published_settings():
            if row.table == table:
                yield from _of_row(row, runs)


def _of_row(row: Setting, runs: PublishedRuns) -> Iterator[Prediction]:
    outcome, configuration = runs.outcome(row), row.configuration(_PROFILE)
    for metric, published in published_cells(row).items():
        if metric in METRICS:
            role = _HELD_OUT if is_held_out(row) else _PREDICTED
            role = _FITTED if metric == _THROUGHPUT and is_fitted(row) else role
            simulated = outcome.values.get(metric)
            reason = outcome.reason if simulated is None else ""
            place = row.table, row.experiment, metric
            yield Prediction(*place, published, simulated, role, reason, configuration)


def write(rows: Sequence[Prediction], path: Path) -> None:
    """Write the file and its companion, whole or not at all: the same bytes on every machine, by the commit that runs.

    Numbers have six digits.

    Raises:
        OutputError: one of them cannot be written.
    """
    commit, dirty = checkout()
    origin = ["simulated", _PROFILE, commit, "" if dirty is None else dirty]
    own = COLUMNS[: -len(origin) - 2]
    lines = [
        [*(_text(getattr(row, column)) for column in own), *origin, digest(row.configuration), SCHEMA_VERSION]
        for row in rows
    ]
    configurations = configuration_records(row.configuration for row in rows)
    beside = path.with_name(f"{path.stem}_{CONFIGURATIONS}{path.suffix}")
    others = [[record[name] for name in CONFIGURATION_COLUMNS] for record in configurations]
    write_files({path: lines_text([COLUMNS, *lines]), beside: lines_text([CONFIGURATION_COLUMNS, *others])})


def _text(value: str | float | None) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else f"{value:.6g}"


def summary(rows: Sequence[Prediction]) -> str:
    """The mean absolute errors in sentences; a cell without a number is counted, never left out in silence."""
    predicted = [row for row in rows if row.role == _PREDICTED]
    counted = [row for row in predicted if row.metric != _COUNTED]
    lines = [
        f"predicted: {_mean_error(predicted)}",
        f"  without model memory, which only counts parameters: {_mean_error(counted)}",
        f"held out until it was predicted: {_mean_error([row for row in rows if row.role == _HELD_OUT])}",
        f"fitted: {_mean_error([row for row in rows if row.role == _FITTED])}",
    ]
    agreed = sum(row.status == "agreed" for row in rows)
    if agreed:
        lines.append(f"out of memory, published and simulated alike: {agreed}")
    missed = [row for row in rows if row.status == "missed"]
    if missed:
        lines.append(f"MISSED, and in no mean: {len(missed)} out of memory in only one of published and simulated:")
        lines += [
            f"  {row.table} {row.experiment} {row.metric}: {row.reason or 'published as out of memory'}"
            for row in missed
        ]
    return "\n".join(lines)


def _mean_error(rows: Sequence[Prediction]) -> str:
    errors = [abs(row.error_fraction) for row in rows if row.error_fraction is not None]
    if not errors:
        return "no cells"
    mean = 100 * sum(errors) / len(errors)
    return f"mean absolute error {mean:.2f} % of {len(errors)} cells, largest {100 * max(errors):.1f} %"


_LINE: Final = "{:<18}  {:<11}  {:<24}  {:>9}  {:>9}  {:>7}  {}"


def _line(row: Prediction) -> str:
    numbers = ("oom" if value is None else f"{value:.3f}" for value in (row.published, row.simulated))
    error = row.status if row.error_fraction is None else f"{100 * row.error_fraction:+.1f} %"
    return _LINE.format(row.table, row.experiment, row.metric, *numbers, error, row.role)


def print_predictions(out: Path, tables: Sequence[str] = TABLES, cache: Path | None = None) -> None:
    """Simulate the published cells, print a line for each as it is done, write the file and print its mean errors.

    Args:
        out: the file.
        tables: some of :data:`TABLES`.
        cache: folder of stored traces; the user's cache folder by default.

    Raises:
        OutputError: see :func:`write`.
    """
    print(_LINE.format("table", "experiment", "metric", "published", "simulated", "error", "role"))
    rows: list[Prediction] = []
    # Traces and workloads are many objects without cycles, and all of them are needed until the end.
    with no_collection():
        for row in predictions(tables, cache):
            print(_line(row), flush=True)
            rows.append(row)
    write(rows, out)
    print(f"\n{summary(rows)}\n\nwritten: {out}")
