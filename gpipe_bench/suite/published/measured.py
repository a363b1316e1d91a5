"""Training steps that were measured on GPUs, beside what the simulator says of them.

    gpipe-bench predictions --table h200-steps

Steps of one device gave the two constants of the host, and a loop tells how slow the host of the pipelines was.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Final

from gpipe_bench.data import REFERENCE_FOLDER
from gpipe_bench.results.configurations import CONFIGURATION_COLUMNS
from gpipe_bench.results.rows import Row
from gpipe_bench.results.tables import plain_records, read_records, read_table
from gpipe_bench.suite.cell_files import read_cells
from gpipe_bench.suite.running.simulated import simulated_step
from gpipe_bench.suite.simulated_cells import SimulatedCell

DEVICE_BOUND: Final = 0.9
"""A step whose host takes a larger share is bound by the host."""

_LINE: Final = "{:<12}  {:<9}  {:>5}  {:<11}  {:>9}  {:>9}  {:>7}  {:<8}  {}"


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """Steps that were measured on one machine.

    Attributes:
        title: what they are.
        rows: their table, below the measured reference results; configurations are beside it.
        profile: hardware on which they are simulated.
        launch_us: their host's time of an operation; None: the profile's.
        host_of: how the steps ran that tell ``launch_us``; None where none does.
        needs: file of their model, below the current folder.
    """

    title: str
    rows: str
    profile: str
    launch_us: float | None = None
    host_of: str | None = None
    needs: str = ""


TABLES: Final[Mapping[str, MeasuredTable]] = {
    "h200-steps": MeasuredTable("steps measured on an H200", "1x-nvidia-h200/single.csv", "h200"),
    "h200-pipelines": MeasuredTable(
        "pipelines measured on an H200, with a slower host",
        "1x-nvidia-h200/pipelines.csv",
        "h200",
        launch_us=41.4,
        host_of="a loop over micro-batches without a pipeline",
        needs="examples/transformer_blocks.py",
    ),
    "h100-steps": MeasuredTable(
        "four partitions measured on one H100", "1x-nvidia-h100-80gb-hbm3/ablation.csv", "h100"
    ),
}
"""The tables, as ``predictions`` calls them."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """A step.

    Attributes:
        cell: as it is simulated.
        run_as: what ran it; '' for the executor of the cell.
        measured_ms: time of the step, the median over repeats.
        simulated_ms: the simulator's.
        host_ms: time that the host took for it, measured; None where it is not known.
        measured_gib: peak of allocated memory, where it is known.
        simulated_gib: the simulator's.
    """

    cell: SimulatedCell
    run_as: str
    measured_ms: float
    simulated_ms: float
    host_ms: float | None
    measured_gib: float | None
    simulated_gib: float

    @property
    def error_fraction(self) -> float:
        """Simulated over measured time, minus 1."""
        return self.simulated_ms / self.measured_ms - 1

    @property
    def bound_by(self) -> str:
        """``device``, or ``host`` where that takes about as long as the step; '' where it is not known."""
        if self.host_ms is None:
            return ""
        return "device" if self.host_ms <= DEVICE_BOUND * self.measured_ms else "host"


def measured_steps(table: MeasuredTable, cache: Path | None = None) -> Iterator[MeasuredStep]:
    """Simulate the measured steps, one after the other; ``cache``: folder of stored traces."""
    path = REFERENCE_FOLDER / "measured" / table.rows
    beside = path.with_name(f"{path.stem}_configurations.csv")
    lines = plain_records(read_table(beside, CONFIGURATION_COLUMNS))
    hosts = {line["config_sha256"]: json.loads(line["configuration"]).get("host_ms") for line in lines}
    rows = [row for row in read_records(path, (), Row) if row.status == "ok"]
    names = [row.config_sha256[:8] for row in rows]
    repeats: dict[tuple[SimulatedCell, str], list[Row]] = {}
    for row, cell in zip(rows, read_cells(beside, SimulatedCell, names, table.profile, table.launch_us), strict=True):
        repeats.setdefault((cell, row.source.partition(": ")[2]), []).append(row)
    for (cell, run_as), own in repeats.items():
        step = simulated_step(cell, cell.balance, cache=cache)
        assert step.step_time_ms is not None  # noqa: S101 - all of them fit
        measured_ms = median(filter(None, (row.step_time_ms for row in own)))
        host_ms, measured_gib = (
            median(known) if (known := [*filter(None, values)]) else None
            for values in ([hosts[row.config_sha256] for row in own], [row.peak_allocated_gib for row in own])
        )
        memory = measured_gib, step.peak_allocated_gib or 0.0
        yield MeasuredStep(cell, run_as, measured_ms, step.step_time_ms, host_ms, *memory)


def print_measured(table: MeasuredTable, cache: Path | None = None) -> None:
    """Simulate the measured steps; print a line for each, and their mean errors by what ran and bound them."""
    if table.needs and not Path(table.needs).is_file():
        print(f"left out: their model is {table.needs} of a checkout, which is not below the current folder")
        return
    header = "model", "precision", "batch", "checkpoint", "measured", "simulated", "error", "bound by", "run as"
    print(_LINE.format(*header))
    errors: dict[str, list[float]] = {}
    peaks: list[float] = []
    for step in measured_steps(table, cache):
        cell, times = step.cell, (f"{time:.1f} ms" for time in (step.measured_ms, step.simulated_ms))
        words = cell.model.rpartition(":")[2], cell.precision, cell.batch_size, cell.checkpoint, *times
        error = f"{100 * step.error_fraction:+.1f} %"
        print(_LINE.format(*words, error, step.bound_by, step.run_as or cell.variant), flush=True)
        bound = f"bound by the {step.bound_by}" if step.bound_by else ""
        told = f"which tells launch_us = {table.launch_us}" if step.run_as == table.host_of else ""
        kind = ", ".join(filter(None, (step.run_as, told or bound)))
        errors.setdefault(kind or "all", []).append(step.error_fraction)
        if step.measured_gib:
            peaks.append(step.simulated_gib / step.measured_gib - 1)
    for name, fractions in {**errors, "peaks of allocated memory": peaks}.items():
        own = [100 * abs(error) for error in fractions]
        print(f"{name}: mean absolute error {mean(own):.1f} % of {len(own)} steps, largest {max(own):.1f} %")
