"""Experiments: from a section of the configuration to the runs that it asks for.

A new experiment is a section here with its own :meth:`Experiment.runs` and a field of ``SuiteConfig``; schema, default
file, checks, command line and tables follow from that.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from gpipe_bench.bench.cells import Cell, CellRun
from gpipe_bench.bench.machine import Machine
from gpipe_bench.bench.settings import Balance, BatchSize, CellSettings, Chunks, ModelArgs, Section, Warmup
from gpipe_bench.bench.simulated_cells import SimulatedWorkload
from gpipe_bench.bench.standins import without_copy_streams
from gpipe_bench.bench.variants import Variants, labels_of
from gpipe_bench.components import PUBLISHED

__all__ = ["Ablation", "Experiment", "Workload"]

Repeats = Annotated[
    int,
    Field(strict=True, ge=1, description="runs of each published variant, each in a fresh process"),
]
OtherRepeats = Annotated[int, Field(strict=True, ge=1, description="runs of each other variant")]
Transfer = Annotated[
    Literal["auto", "direct", "host"],
    Field(description="how tensors cross partitions; auto: host where some share a device"),
]


class Workload(CellSettings):
    """One model and batch, run with several variants of the pipeline."""

    transfer: Transfer = "auto"
    repeats: Repeats = 3
    other_repeats: OtherRepeats = 2
    variants: Variants = ("published", "factorial")

    def labels(self) -> list[str]:
        """The labels of the variants, in the order in which they were asked for, none twice."""
        return labels_of(self.variants)

    def cells(self, machine: Machine) -> Iterator[Cell]:
        """A cell for each variant on the devices of ``machine``, at most one device per partition."""
        devices = min(machine.count, self.partitions)
        # Within one device nothing would have to move, and what portals and copy streams do would not show.
        fitting: Literal["direct", "host"] = "host" if devices < self.partitions else "direct"
        transfer = fitting if self.transfer == "auto" else self.transfer
        common = {name: getattr(self, name) for name in CellSettings.model_fields}
        for label in self.labels():
            yield Cell(**common, variant=label, transfer=transfer, device=machine.device, devices=devices)

    def runs(self, machine: Machine) -> list[CellRun]:
        """The runs of those cells; one that the machine cannot run is asked for once, as a row that says so.

        What stands in for a published variant that cannot run is repeated as often as a published one.
        """
        cells = list(self.cells(machine))
        published = [cell for cell in cells if cell.variant in PUBLISHED]
        first = {without_copy_streams(cell.variant) if cell.unsupported() else cell.variant for cell in published}
        runs: list[CellRun] = []
        for cell in cells:
            repeats = self.repeats if cell.variant in first else self.other_repeats
            runs += [CellRun(cell, repeat) for repeat in range(1 if cell.unsupported() else repeats)]
        return runs


class CpuWorkload(Workload):
    """What is measured on a CPU: small, with skips that cross partitions."""


class CudaWorkload(Workload):
    """What is measured on GPUs: torchgpipe's own ablation (benchmarks/unet-timeline of torchgpipe 0.0.7)."""

    model_args: ModelArgs = "depth=5;B=5;C=64;size=192"
    batch_size: BatchSize = 128
    chunks: Chunks = 8
    balance: Balance = (34, 76, 70, 61)
    warmup: Warmup = 2
    repeats: Repeats = 4


class Experiment(Section):
    """A section of the configuration that asks for runs."""

    @abstractmethod
    def runs(self, machine: Machine) -> list[CellRun]:
        """The runs on ``machine``; what it cannot run is among them, as rows that say so."""

    def simulation(self) -> SimulatedWorkload | None:
        """What is simulated; nothing by default."""
        return None


class Ablation(Experiment):
    """Throughput and memory with each component of the pipeline switched on and off."""

    cpu: Annotated[CpuWorkload, Field(description="on a machine without a GPU")] = CpuWorkload()
    cuda: Annotated[CudaWorkload, Field(description="on GPUs; partitions share them where they are too few")] = (
        CudaWorkload()
    )
    simulated: Annotated[SimulatedWorkload, Field(description="in virtual time, whatever this machine has")] = (
        SimulatedWorkload()
    )

    def runs(self, machine: Machine) -> list[CellRun]:
        """Every variant of the workload for this type of device."""
        workload: Workload = self.cuda if machine.device == "cuda" else self.cpu
        return workload.runs(machine)

    def simulation(self) -> SimulatedWorkload:
        """Every variant of the simulated workload."""
        return self.simulated
