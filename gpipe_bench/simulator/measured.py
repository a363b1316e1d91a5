"""Training steps that were measured on one GPU, beside what the simulator says of them.

    gpipe-bench predictions --table h200-steps

The rows are in ``results/reference/measured/1x-nvidia-h200/single.csv``. Times of single operators in these runs gave
the constants of the profile; no step was fitted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.models.arguments import read_text
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import plain_records, read_table

TABLE: Final = "h200-steps"
"""What ``predictions`` calls them."""

_ROWS: Final = REFERENCE_FOLDER / "measured" / "1x-nvidia-h200" / "single.csv"
_PROFILE: Final = "h200"
DEVICE_BOUND: Final = 0.9
"""A step whose host takes a larger share is bound by the host."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step.

    Attributes:
        model: its name.
        precision: of weights, activations and gradients.
        batch_size: samples.
        measured_ms: time of the step.
        simulated_ms: the simulator's.
        host_ms: time that the host took for it, measured.
        measured_gib: peak of allocated memory, where it is known.
        simulated_gib: the simulator's.
    """

    model: str
    precision: str
    batch_size: int
    measured_ms: float
    simulated_ms: float
    host_ms: float
    measured_gib: float | None
    simulated_gib: float

    @property
    def error_fraction(self) -> float:
        """Simulated over measured time, minus 1."""
        return self.simulated_ms / self.measured_ms - 1

    @property
    def bound_by(self) -> str:
        """``device``, or ``host`` where that takes about as long as the step."""
        return "device" if self.host_ms <= DEVICE_BOUND * self.measured_ms else "host"


def measured_steps(cache: Path | None = None) -> Iterator[MeasuredStep]:
    """Simulate the measured steps, one after the other; ``cache``: folder of stored traces."""
    beside = read_table(_ROWS.with_name(f"{_ROWS.stem}_configurations.csv"), CONFIGURATION_COLUMNS)
    settings = {line["config_sha256"]: json.loads(line["configuration"]) for line in plain_records(beside)}
    for row in plain_records(read_table(_ROWS, Row.columns())):
        yield _step(row, settings[row["config_sha256"]], cache)


def _step(row: dict[str, Any], how: dict[str, Any], cache: Path | None) -> MeasuredStep:
    # Published cells whose workloads are kept need neither PyTorch nor what checks profiles.
    from gpipe_bench.simulator.api import Model, simulate

    arguments, _ = read_text(row["model_args"])
    step = simulate(
        Model(row["model"], arguments),
        balance=[int(row["balance"])],
        batch_size=int(row["batch_size"]),
        checkpoint=row["checkpoint"],
        precision=how["precision"],
        masters=False,
        profile=_PROFILE,
        cache=cache,
    )
    assert step.step_time_ms is not None  # noqa: S101 - all of them fit
    place = row["model"], how["precision"], int(row["batch_size"])
    times = float(row["step_time_ms"]), step.step_time_ms, how["host_ms"]
    return MeasuredStep(*place, *times, row["peak_allocated_gib"], step.peak_allocated_gib or 0.0)


def print_measured(cache: Path | None = None) -> None:
    """Simulate the measured steps, and print a line for each and their mean errors."""
    line = "{:<12}  {:<9}  {:>5}  {:>9}  {:>9}  {:>7}  {}"
    print(line.format("model", "precision", "batch", "measured", "simulated", "error", "bound by"))
    found: list[MeasuredStep] = []
    for step in measured_steps(cache):
        times = (f"{time:.1f} ms" for time in (step.measured_ms, step.simulated_ms))
        error = f"{100 * step.error_fraction:+.1f} %"
        print(line.format(step.model, step.precision, step.batch_size, *times, error, step.bound_by), flush=True)
        found.append(step)
    for bound in ("device", "host"):
        print(f"bound by the {bound}: {_mean_error(step.error_fraction for step in found if step.bound_by == bound)}")
    peaks = (step.simulated_gib / step.measured_gib - 1 for step in found if step.measured_gib)
    print(f"peaks of allocated memory: {_mean_error(peaks)}")


def _mean_error(fractions: Iterable[float]) -> str:
    errors = [100 * abs(error) for error in fractions]
    mean = sum(errors) / len(errors)
    return f"mean absolute error {mean:.1f} % of {len(errors)} steps, largest {max(errors):.1f} %"
