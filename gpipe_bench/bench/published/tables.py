"""The published tables of speed and of memory: simulated as they were run, emulated, and measured where devices are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Annotated, Any, Literal

from pydantic import Field

from gpipe_bench.bench.published.values import published_rows
from gpipe_bench.bench.spec.cells import CellRun, MeasuredCell
from gpipe_bench.bench.spec.emulated_cells import MOST_DEVICES, EmulatedCell
from gpipe_bench.bench.spec.experiment import Experiment
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.spec.settings import Steps, Warmup
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell
from gpipe_bench.models.table import MODELS
from gpipe_bench.results.rows import Row
from gpipe_bench.simulator.published.settings import published_settings

Table = Literal["unet-speed", "amoebanet-d-speed", "resnet101-speed", "unet-memory", "amoebanet-d-memory"]
Tables = Annotated[
    tuple[Table, ...], Field(min_length=1, max_length=64, description="published tables to simulate as they were run")
]
EmulatedTables = Annotated[
    tuple[Table, ...], Field(max_length=64, description="published tables to emulate, a whole batch of each row")
]
Repeats = Annotated[
    int,
    Field(strict=True, ge=0, le=1000, description="measured runs of each row, where there are GPUs enough; 0: none"),
]


class SpeedTables(Experiment):
    """Throughput of the published tables."""

    simulated_tables: Tables = ("unet-speed", "amoebanet-d-speed")
    emulated_tables: EmulatedTables = ("unet-speed", "amoebanet-d-speed")
    repeats: Repeats = 3
    warmup: Warmup = 2
    steps: Steps = 5

    def tables(self) -> Sequence[str]:
        """The tables."""
        return self.simulated_tables

    def runs(self, machine: Machine) -> list[CellRun]:
        """On GPUs, the rows of models of the suite that need no more of them than there are."""
        if machine.device == "cpu":
            return []
        runs = []
        for settings in _rows(self.simulated_tables, machine.count):
            cell = MeasuredCell(
                **settings, warmup=self.warmup, steps=self.steps, device=machine.device, devices=settings["partitions"]
            )
            runs += [CellRun(cell, repeat) for repeat in range(self.repeats)]
        return runs

    def simulations(self) -> list[SimulatedCell]:
        """What is emulated, as the simulator has it with the autograd engine of today."""
        return list({cell.id: cell for cell in (emulated.twin for emulated in self.emulations())}.values())

    def emulations(self) -> list[EmulatedCell]:
        """The rows of models of the suite."""
        optimizers: dict[str, Any] = {row.table: row.optimizer for row in published_settings()}
        return [
            EmulatedCell(**settings, optimizer=optimizers[table])
            for table in self.emulated_tables
            for settings in _rows([table], MOST_DEVICES)
        ]


class MemoryTables(SpeedTables):
    """Memory of the published tables."""

    simulated_tables: Tables = ("unet-memory", "amoebanet-d-memory")
    emulated_tables: EmulatedTables = ("unet-memory", "amoebanet-d-memory")
    warmup: Warmup = 0
    steps: Steps = 2
    repeats: Repeats = 1


def _rows(tables: Sequence[str], devices: int) -> Iterator[dict[str, Any]]:
    """The settings of the rows of published tables, as far as they are of models of the suite and devices suffice."""
    names = ("model", "model_args", "batch_size", "chunks", "partitions", "balance", "checkpoint", "variant")
    for row in _published():
        if row.experiment in tables and row.model in MODELS and (row.partitions or 0) <= devices:
            yield {name: getattr(row, name) for name in names}


@cache
def _published() -> tuple[Row, ...]:
    return tuple(published_rows())
