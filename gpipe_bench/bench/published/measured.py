"""Training steps of pipelines that were measured on one H100, beside what the simulator says of them.

    gpipe-bench predictions --table h100-steps

The rows are in ``results/reference/measured/1x-nvidia-h100-80gb-hbm3/ablation.csv``: four partitions share the device,
and nothing is rounded to TF32. No step was fitted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Final

from gpipe_bench.bench.running.simulated import simulated_step
from gpipe_bench.bench.spec.cell_files import read_cells
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import read_records

TABLE: Final = "h100-steps"
"""What ``predictions`` calls them."""

_ROWS: Final = REFERENCE_FOLDER / "measured" / "1x-nvidia-h100-80gb-hbm3" / "ablation.csv"


@dataclass(frozen=True, slots=True)
class MeasuredPipeline:
    """A cell that was measured.

    Attributes:
        variant: label of its components.
        measured_ms: median over repeats.
        simulated_ms: the simulator's.
    """

    variant: str
    measured_ms: float
    simulated_ms: float

    @property
    def error_fraction(self) -> float:
        """Simulated over measured time, minus 1."""
        return self.simulated_ms / self.measured_ms - 1


def measured_pipelines(cache: Path | None = None) -> Iterator[MeasuredPipeline]:
    """Simulate the measured cells, one after the other; ``cache``: folder of stored traces."""
    rows = [row for row in read_records(_ROWS, (), Row) if row.status == "ok"]
    beside = _ROWS.with_name(f"{_ROWS.stem}_configurations.csv")
    for cell in read_cells(beside, SimulatedCell, profile="h100"):
        times = [row.step_time_ms for row in rows if row.variant == cell.variant and row.step_time_ms is not None]
        simulated = simulated_step(cell, cell.balance, cache=cache).step_time_ms
        assert simulated is not None  # noqa: S101 - all of them fit
        yield MeasuredPipeline(cell.variant, median(times), simulated)


def print_pipelines(cache: Path | None = None) -> None:
    """Simulate the measured cells, and print a line for each and their mean error."""
    line = "{:<12}  {:>10}  {:>10}  {:>7}"
    print(line.format("variant", "measured", "simulated", "error"))
    found = []
    for one in measured_pipelines(cache):
        times = (f"{time:.0f} ms" for time in (one.measured_ms, one.simulated_ms))
        print(line.format(one.variant, *times, f"{100 * one.error_fraction:+.1f} %"), flush=True)
        found.append(abs(one.error_fraction))
    print(f"mean absolute error {100 * mean(found):.1f} % of {len(found)} steps, largest {100 * max(found):.1f} %")
