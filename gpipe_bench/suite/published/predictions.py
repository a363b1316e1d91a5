"""Every published throughput, memory and utilisation of a row with settings, beside what the simulator says of it.

    gpipe-bench predictions --out results/predictions.csv

writes a row per published cell and prints the table and its mean error. In the file a cell without a number ran out of
memory; then it has no error either, and the printed table says which of the two ran out. Beside it lies
``predictions_configurations.csv``: how the cell of each row was run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpipe_bench.machine.profile import load_profile
from gpipe_bench.models.table import parse_arguments
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS, CONFIGURATIONS, configuration_records
from gpipe_bench.results.rows import SCHEMA_VERSION, Row
from gpipe_bench.results.schema import TABLES
from gpipe_bench.results.tables import lines_text
from gpipe_bench.simulator.published.settings import PublishedSetting, published_cells, settings_of
from gpipe_bench.simulator.workloads.sources import model_of_suite
from gpipe_bench.suite.published.simulations import simulate_published
from gpipe_bench.suite.running.simulated import simulation_facts
from gpipe_bench.suite.storage.raw import RawResult
from gpipe_bench.util.files import write_files
from gpipe_bench.util.garbage import no_collection

_COLUMNS: Final = TABLES["predictions"].columns
_COUNTED: Final = "model_memory_gib"
_ROLES: Final = ("predicted", "held_out", "transferred", "fitted")
_GIB: Final = 2**30
_PER_PARAMETER: Final = 3
"""A parameter, its gradient and RMSprop's average."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """A published cell.

    Attributes:
        setting: how it was run.
        metric: the quantity, with its unit.
        published: its value; None for out of memory.
        simulated: the simulator's value; None for out of memory.
        row: the simulated row.
    """

    setting: PublishedSetting
    metric: str
    published: float | None
    simulated: float | None
    row: Row

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

    @property
    def record(self) -> dict[str, Any]:
        """The line of the file; its numbers have six digits."""
        numbers = {name: getattr(self, name) for name in ("published", "simulated", "error_fraction")}
        return {
            **{name: getattr(self.row, name) for name in ("evidence", "profile", "commit", "dirty", "config_sha256")},
            **{name: "" if value is None else f"{value:.6g}" for name, value in numbers.items()},
            **{name: getattr(self.setting, name) for name in ("table", "experiment", "role")},
            "metric": self.metric,
            "schema_version": SCHEMA_VERSION,
        }


def _model_gib(setting: PublishedSetting, _: RawResult, cache: Path | None) -> float:
    facts = model_of_suite(setting.model, parse_arguments(setting.model, setting.model_args), cache).facts
    return _PER_PARAMETER * sum(parameter.bytes for layer in facts for parameter in layer.parameters) / _GIB


def _activations_gib(setting: PublishedSetting, result: RawResult, cache: Path | None) -> float | None:
    reserved = result.row.peak_reserved_gib
    return None if reserved is None else reserved - _model_gib(setting, result, cache)


def _fullest_gib(_: PublishedSetting, result: RawResult, __: Path | None) -> float | None:
    peaks = [device["peak_allocated_gib"] for device in result.devices]
    return None if None in peaks else max(peaks, default=None)


def _model_flops(setting: PublishedSetting, result: RawResult, _: Path | None) -> float | None:
    if result.row.throughput_samples_per_s is None or setting.tflop_per_sample is None:
        return None
    peak = load_profile(setting.profile).matrix_tflops[setting.precision]
    return result.row.throughput_samples_per_s * setting.tflop_per_sample / (setting.partitions * peak)


def _per_device(_: PublishedSetting, result: RawResult, __: Path | None) -> float | None:
    speed = result.row.throughput_samples_per_s
    return speed and speed / (result.row.device_count or 1)


METRICS: Final[Mapping[str, Callable[[PublishedSetting, RawResult, Path | None], float | None]]] = {
    "throughput_samples_per_s": lambda _, result, __: result.row.throughput_samples_per_s,
    "throughput_samples_per_s_per_device": _per_device,
    "utilization_fraction": lambda _, result, __: result.row.utilization_fraction,
    "peak_reserved_gib": lambda _, result, __: result.row.peak_reserved_gib,
    "fullest_peak_allocated_gib": _fullest_gib,
    _COUNTED: _model_gib,
    "activation_memory_gib": _activations_gib,
    "model_flops_utilization_fraction": _model_flops,
}
"""What is predicted: throughput, utilisation and memory; not what follows from them, as speed-ups do. Activations are
reserved memory without 12 bytes for each parameter; the fullest device is the one with the most allocated memory; the
utilisation of FLOPs is the share of the devices' peak."""


def predictions(tables: Sequence[str], cache: Path | None = None) -> Iterator[Prediction]:
    """Simulate the published cells of some tables, one after the other; ``cache``: folder of stored traces."""
    facts = simulation_facts()
    for setting in (setting for table in tables for setting in settings_of(table)):
        result = simulate_published(setting, facts, cache)
        for metric, published in published_cells(setting).items():
            if metric in METRICS:
                yield Prediction(setting, metric, published, METRICS[metric](setting, result, cache), result.row)


def write(found: Sequence[Prediction], path: Path) -> None:
    """Write the file and its companion, whole or not at all: the same bytes on every machine, by the commit that runs.

    Raises:
        OutputError: one of them cannot be written.
    """
    lines = [[one.record[name] for name in _COLUMNS] for one in found]
    configurations = configuration_records(one.setting.configuration for one in found)
    beside = path.with_name(f"{path.stem}_{CONFIGURATIONS}{path.suffix}")
    others = [[record[name] for name in CONFIGURATION_COLUMNS] for record in configurations]
    write_files({path: lines_text([_COLUMNS, *lines]), beside: lines_text([CONFIGURATION_COLUMNS, *others])})


def summary(found: Sequence[Prediction]) -> str:
    """The mean absolute errors in sentences; a cell without a number is counted, never left out in silence."""
    roles = {role: [one for one in found if one.setting.role == role] for role in _ROLES}
    counted = [one for one in roles["predicted"] if one.metric != _COUNTED]
    lines = [
        f"predicted: {_mean_error(roles['predicted'])}",
        f"  without model memory, which only counts parameters: {_mean_error(counted)}",
        f"held out until it was predicted: {_mean_error(roles['held_out'])}",
        f"on other hardware, not fitted: {_mean_error(roles['transferred'])}",
        f"fitted: {_mean_error(roles['fitted'])}",
    ]
    tables = dict.fromkeys(one.setting.table for one in found)
    lines += [f"  {table}: {_mean_error(one for one in found if one.setting.table == table)}" for table in tables]
    agreed = sum(one.status == "agreed" for one in found)
    if agreed:
        lines.append(f"out of memory, published and simulated alike: {agreed}")
    missed = [one for one in found if one.status == "missed"]
    if missed:
        lines.append(f"MISSED, and in no mean: {len(missed)} out of memory in only one of published and simulated:")
        lines += [
            f"  {one.setting.table} {one.setting.experiment} {one.metric}: "
            f"{one.row.reason if one.simulated is None else 'published as out of memory'}"
            for one in missed
        ]
    return "\n".join(lines)


def _mean_error(found: Iterable[Prediction]) -> str:
    errors = [abs(one.error_fraction) for one in found if one.error_fraction is not None]
    if not errors:
        return "no cells"
    mean = 100 * sum(errors) / len(errors)
    return f"mean absolute error {mean:.2f} % of {len(errors)} cells, largest {100 * max(errors):.1f} %"


_LINE: Final = "{:<18}  {:<16}  {:<32}  {:>9}  {:>9}  {:>7}  {}"


def print_predictions(out: Path, tables: Sequence[str], cache: Path | None = None) -> None:
    """Simulate the published cells, print a line for each as it is done, write the file and print its mean errors.

    Args:
        out: the file.
        tables: published tables.
        cache: folder of stored traces; the user's cache folder by default.

    Raises:
        OutputError: see :func:`write`.
    """
    print(_LINE.format("table", "experiment", "metric", "published", "simulated", "error", "role"))
    found: list[Prediction] = []
    # Traces and workloads are many objects without cycles, and all of them are needed until the end.
    with no_collection():
        for one in predictions(tables, cache):
            numbers = ("oom" if value is None else f"{value:.3f}" for value in (one.published, one.simulated))
            error = one.status if one.error_fraction is None else f"{100 * one.error_fraction:+.1f} %"
            words = one.setting.table, one.setting.experiment, one.metric, *numbers, error, one.setting.role
            print(_LINE.format(*words), flush=True)
            found.append(one)
    write(found, out)
    print(f"\n{summary(found)}\n\nwritten: {out}")
