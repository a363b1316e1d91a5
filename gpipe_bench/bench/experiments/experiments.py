"""The ablation, and the sweeps as one section of the configuration.

A new experiment is an :class:`~gpipe_bench.bench.spec.experiment.Experiment` with its own runs and simulations, and a
field of ``SuiteConfig``; schema, default file, checks, command line and tables follow from that.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from gpipe_bench.bench.experiments.cpu import CpuWorkload
from gpipe_bench.bench.experiments.sweeps import CpuSweep, CudaSweep, MeasuredSweep, ProcessSweep, SimulatedSweep
from gpipe_bench.bench.spec.cells import CellRun, MeasuredCell, MeasuredSettings
from gpipe_bench.bench.spec.emulated_cells import EmulatedCell, EmulatedWorkload
from gpipe_bench.bench.spec.experiment import Experiment
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.spec.names import readable
from gpipe_bench.bench.spec.settings import Balance, BatchSize, Chunks, ModelArgs, Problem, Section, Warmup
from gpipe_bench.bench.spec.simulated_cells import SimulatedCell, SimulatedWorkload
from gpipe_bench.bench.spec.variants import Variants, labels_of
from gpipe_bench.components import PUBLISHED
from gpipe_bench.util import choices

Repeats = Annotated[
    int,
    Field(strict=True, ge=1, le=1000, description="runs of each published variant, each in a fresh process"),
]
OtherRepeats = Annotated[int, Field(strict=True, ge=1, le=1000, description="runs of each other variant")]
Transfer = Annotated[
    Literal["auto", choices.Transfer],
    Field(description="how tensors cross partitions; auto: host where some share a device"),
]


class Workload(MeasuredSettings):
    """One model and batch, run with several variants of the pipeline; the defaults are small."""

    transfer: Transfer = "auto"
    repeats: Repeats = 4
    other_repeats: OtherRepeats = 2
    variants: Variants = ("published", "factorial")

    def cells(self, machine: Machine) -> Iterator[MeasuredCell]:
        """A cell for each variant on the devices of ``machine``, at most those of the schedule."""
        devices = min(machine.count, self.schedule_devices)
        # Within one device nothing would have to move, and what portals and copy streams do would not show.
        fitting = "host" if devices < self.schedule_devices else "direct"
        transfer = fitting if self.transfer == "auto" else self.transfer
        place = {"transfer": transfer, "device": machine.device, "devices": devices}
        for label in labels_of(self.variants):
            yield MeasuredCell(**{**self.shared(MeasuredCell), **place, "variant": label})

    def runs(self, machine: Machine) -> list[CellRun]:
        """The runs of those cells; one that the machine cannot run is asked for once, as a row that says so.

        What stands in for a published variant that cannot run is repeated as often as a published one.
        """
        cells = list(self.cells(machine))
        first = {cell.stand_in for cell in cells if cell.variant in PUBLISHED}
        runs: list[CellRun] = []
        for cell in cells:
            repeats = self.repeats if cell.variant in first else self.other_repeats
            runs += [CellRun(cell, repeat) for repeat in range(1 if cell.unsupported() else repeats)]
        return runs


class CudaWorkload(Workload):
    """What is measured on GPUs: torchgpipe's own ablation (benchmarks/unet-timeline of torchgpipe 0.0.7)."""

    model_args: ModelArgs = "depth=5;B=5;C=64;size=192"
    batch_size: BatchSize = 128
    chunks: Chunks = 8
    balance: Balance = (34, 76, 70, 61)
    warmup: Warmup = 2
    repeats: Repeats = 4


class Ablation(Experiment):
    """Throughput and memory with each component switched on and off; on a CPU, of each way to run the pipeline."""

    timelines: ClassVar[bool] = True

    cpu: Annotated[CpuWorkload, Field(description="on a machine without a GPU")] = CpuWorkload()
    cuda: Annotated[CudaWorkload, Field(description="on GPUs; partitions share them where they are too few")] = (
        CudaWorkload()
    )
    simulated: Annotated[SimulatedWorkload, Field(description="in virtual time, whatever this machine has")] = (
        SimulatedWorkload()
    )
    emulated: Annotated[EmulatedWorkload, Field(description="the engine itself on virtual devices")] = (
        EmulatedWorkload()
    )

    def runs(self, machine: Machine) -> list[CellRun]:
        """All of the workload for this type of device."""
        workload: Workload | CpuWorkload = self.cuda if machine.device == "cuda" else self.cpu
        return workload.runs(machine)

    def simulations(self) -> list[SimulatedCell]:
        """Every variant of the simulated workload, and of the emulated one as the simulator has it."""
        cells = [*self.simulated.cells(), *(cell.twin for cell in self.emulated.cells())]
        return list({cell.id: cell for cell in cells}.values())

    def emulations(self) -> list[EmulatedCell]:
        """Every variant of the emulated workload."""
        return self.emulated.cells()


class MeasuredSweeps(Experiment):
    """The sweep of this machine's type of device."""

    cpu: Annotated[CpuSweep, Field(description="on a machine without a GPU")] = CpuSweep()
    cuda: Annotated[CudaSweep, Field(description="on GPUs, as many as there are")] = CudaSweep()

    def runs(self, machine: Machine) -> list[CellRun]:
        """The runs of the sweep for this type of device."""
        sweep: MeasuredSweep = self.cuda if machine.device == "cuda" else self.cpu
        return sweep.runs(machine)


def _emulated(batch: int, most: int) -> tuple[str, ...]:
    """Cells that one process emulates in a minute or two: up to 16 devices, ``most`` chunks of the largest batch."""
    modes = {4: (16, "except_last"), 8: (32, "always"), 16: (most, "always")}
    return tuple(f"n{n}-m{chunks}-b{batch}-{mode}" for n, (chunks, mode) in modes.items())


_SIMULATED: dict[str, SimulatedSweep] = {
    "amoebanet-d": SimulatedSweep(model="amoebanet-d", model_args="L=72;D=256", emulated=_emulated(256, 32)),
    "gpt2-xl": SimulatedSweep(
        model="gpt2-xl", profile="h100", batch_size=256, microbatch_size=4, emulated=_emulated(256, 64)
    ),
    "unet": SimulatedSweep(emulated=_emulated(256, 64)),
    "vit": SimulatedSweep(
        model="vit", model_args="L=32;D=1280", profile="h100", batch_size=512, microbatch_size=16,
        emulated=_emulated(512, 64),
    ),
}  # fmt: skip


class Sweeps(Section):
    """Numbers of partitions and micro-batches, in every checkpoint mode."""

    simulated: Annotated[
        dict[str, SimulatedSweep],
        Field(max_length=64, description="in virtual time, one sweep per key; a new one is a key of yours"),
    ] = _SIMULATED
    measured: Annotated[MeasuredSweeps, Field(description="on this machine, as far as its devices go")] = (
        MeasuredSweeps()
    )
    processes: Annotated[ProcessSweep, Field(description="on this machine, a process for each device")] = ProcessSweep()

    def problems(self) -> Iterator[Problem]:
        """Names of sweeps are parts of file names."""
        for name in self.simulated:
            if readable(name) != name or name in ("measured", "processes"):
                rule = "must have names of lower-case letters, digits and hyphens, not measured or processes"
                text = f"{rule}, got {name!r}"
                yield Problem(("simulated",), f"{text}; rename it")

    def experiments(self) -> dict[str, Experiment]:
        """Each sweep by the name of its results."""
        simulated = {f"sweep_{name}": sweep for name, sweep in self.simulated.items()}
        return {**simulated, "sweep_measured": self.measured, "sweep_processes": self.processes}
