"""The published tables of speed and of memory: simulated as they were run, and measured where there are the devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from gpipe_bench.bench.published.values import published_rows
from gpipe_bench.bench.spec.cells import Cell, CellRun
from gpipe_bench.bench.spec.experiment import Experiment
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.spec.settings import Steps, Warmup
from gpipe_bench.models.table import MODELS

__all__ = ["MemoryTables", "SpeedTables"]

Table = Literal["unet-speed", "amoebanet-d-speed", "resnet101-speed", "unet-memory", "amoebanet-d-memory"]
Tables = Annotated[
    tuple[Table, ...], Field(min_length=1, max_length=64, description="published tables to simulate as they were run")
]
Repeats = Annotated[
    int,
    Field(strict=True, ge=0, le=1000, description="measured runs of each row, where there are GPUs enough; 0: none"),
]


class SpeedTables(Experiment):
    """Throughput of the published tables."""

    simulated_tables: Tables = ("unet-speed", "amoebanet-d-speed")
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
        rows = [row for row in published_rows() if row.experiment in self.simulated_tables and row.model in MODELS]
        runs = []
        for row in rows:
            if (row.partitions or 0) > machine.count:
                continue
            names = ("model", "model_args", "batch_size", "chunks", "partitions", "balance", "checkpoint", "variant")
            settings: dict[str, Any] = {name: getattr(row, name) for name in names}
            cell = Cell(
                **settings, warmup=self.warmup, steps=self.steps, device=machine.device, devices=settings["partitions"]
            )
            runs += [CellRun(cell, repeat) for repeat in range(self.repeats)]
        return runs


class MemoryTables(SpeedTables):
    """Memory of the published tables."""

    simulated_tables: Tables = ("unet-memory", "amoebanet-d-memory")
    warmup: Warmup = 0
    steps: Steps = 2
    repeats: Repeats = 1
