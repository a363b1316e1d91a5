"""Every schedule on the same devices: what it gains in throughput, and what it costs in memory.

    devices      all schedules, numbers of micro-batches and checkpoint modes
    scaling      other numbers of devices, with the most micro-batches and the last checkpoint mode
    apart        those of the last checkpoint mode again, with steps that do not overlap

A schedule with two partitions on each device cuts the model into twice as many partitions.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from gpipe_bench.bench.spec.cells import CellRun, MeasuredCell
from gpipe_bench.bench.spec.emulated_cells import MOST_DEVICES, EmulatedCell
from gpipe_bench.bench.spec.experiment import Experiment
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.spec.settings import (
    BatchSize,
    Checkpoint,
    ChunkCounts,
    Chunks,
    Count,
    Model,
    ModelArgs,
    ModelSection,
    Modes,
    Problem,
    Seed,
    Steps,
    Threads,
    Warmup,
    cut_problems,
)
from gpipe_bench.bench.spec.simulated_cells import Optimizer, Precision, Profile, SimulatedCell
from gpipe_bench.schedules.table import SCHEDULES, TWO_PER_DEVICE, ScheduleName

Schedules = Annotated[
    tuple[ScheduleName, ...],
    Field(min_length=1, max_length=len(SCHEDULES), description="see docs/schedules.md"),
]
Devices = Annotated[int, Field(strict=True, ge=1, le=4096, description="devices of every cell but those of scaling")]
Scaling = Annotated[tuple[Count, ...], Field(max_length=64, description="other numbers of devices")]
Emulated = Annotated[
    tuple[Literal["always", "except_last", "never"], ...],
    Field(max_length=3, description="modes whose cells with the fewest micro-batches are emulated, too"),
]
Repeats = Annotated[int, Field(strict=True, ge=1, le=1000, description="runs of each cell, each in a fresh process")]


def partitions_of(schedule: str, devices: int) -> int:
    """How many partitions a schedule has on so many devices."""
    return devices * (2 if schedule in TWO_PER_DEVICE else 1)


class ScheduleSweep(ModelSection, Experiment):
    """One model on one type of device, with each schedule; in virtual time.

    Attributes:
        apart: whether the cells of the last checkpoint mode are there again, with steps that do not overlap.
    """

    apart: ClassVar[bool] = True

    model: Model = "unet"
    model_args: ModelArgs = "depth=5;B=5;C=64;size=192"
    profile: Profile = "p40"
    batch_size: BatchSize = 128
    chunks: ChunkCounts = (16, 64)
    checkpoints: Modes = ("always", "except_last", "never")
    devices: Devices = 8
    scaling: Scaling = ()
    emulated: Emulated = ()
    precision: Precision = "float32"
    optimizer: Optimizer = "sgd"

    def problems(self) -> Iterator[Problem]:
        """The batch can be cut so, and the model for the most devices."""
        if max(self.chunks) > self.batch_size:
            text = f"must be at most batch_size = {self.batch_size}, got {max(self.chunks)}; lower it or raise that"
            yield Problem(("chunks", "batch_size"), text)
        most = max([self.devices, *self.scaling])
        yield from cut_problems(self, max(partitions_of(name, most) for name in SCHEDULES))
        if self.emulated and self.devices > MOST_DEVICES:
            text = f"must be at most {MOST_DEVICES} where cells are emulated, got {self.devices}"
            yield Problem(("devices", "emulated"), f"{text}; lower it")
        if self.emulated and self.precision != "float32":
            text = f"must be empty with precision {self.precision}, got {', '.join(self.emulated)}"
            yield Problem(("emulated", "precision"), f"{text}; the engine is emulated in float32")

    def simulations(self) -> list[SimulatedCell]:
        """The cells of all schedules on ``devices``, then those of other numbers of devices."""
        points = [(self.devices, *point) for point in product(self.checkpoints, self.chunks)]
        points += [(p, self.checkpoints[-1], max(self.chunks)) for p in self.scaling]
        cells = [
            SimulatedCell(
                **self._settings(name, p),
                checkpoint=mode,
                chunks=chunks,
                precision=self.precision,
                flavour="current",
            )
            for p, mode, chunks in points
            for name in SCHEDULES
        ]
        modes = {self.checkpoints[-1], *self.emulated} if self.apart else set()
        return cells + [cell.changed(steps_overlap=False) for cell in cells if cell.checkpoint in modes]

    def emulations(self) -> list[EmulatedCell]:
        """The cells of all schedules in the modes of ``emulated``."""
        return [
            EmulatedCell(
                **self._settings(name, self.devices), checkpoint=mode, chunks=min(self.chunks), steps_overlap=overlap
            )
            for mode in self.emulated
            for overlap in (True, False)
            for name in SCHEDULES
        ]

    def _settings(self, name: str, devices: int) -> dict[str, Any]:
        names = ("model", "model_args", "profile", "batch_size", "optimizer")
        shared = {field: getattr(self, field) for field in names}
        place = {"partitions": partitions_of(name, devices), "balance": ()}
        return {**shared, **place, "schedule": name}


class ScheduleSteps(ScheduleSweep):
    """One step of each schedule, whose timeline is kept."""

    apart: ClassVar[bool] = False
    timelines: ClassVar[bool] = True
    verified: ClassVar[bool] = False

    model: Model = "gpt2-xl"
    model_args: ModelArgs = ""
    profile: Profile = "h100"
    batch_size: BatchSize = 16
    chunks: ChunkCounts = (8,)
    checkpoints: Modes = ("never",)
    devices: Devices = 4


class MeasuredSchedules(ModelSection):
    """A few schedules on this machine: threads of one process, and a process for each device."""

    model: Model = "gpt2"
    model_args: ModelArgs = "L=6;D=96;heads=4;vocabulary=64;context=64;dropout=0"
    schedules: Schedules = ("gpipe", "1f1b", "zb_h1", "interleaved", "zb_v")
    batch_size: BatchSize = 32
    chunks: Chunks = 8
    checkpoint: Checkpoint = "never"
    devices: Devices = 2
    threads: Threads = 1
    warmup: Warmup = 1
    steps: Steps = 5
    seed: Seed = 0
    repeats: Repeats = 1

    def problems(self) -> Iterator[Problem]:
        """The model can be cut so."""
        yield from cut_problems(self, max(partitions_of(name, self.devices) for name in self.schedules))

    def runs(self, machine: Machine) -> list[CellRun]:
        """The runs of each schedule; a process has a device of its own, as far as the machine has them."""
        enough = machine.device == "cpu" or machine.count >= self.devices
        return [
            CellRun(self._cell(name, processes, machine), repeat)
            for name in self.schedules
            for processes in dict.fromkeys((1, self.devices) if enough else (1,))
            for repeat in range(self.repeats)
        ]

    def _cell(self, name: ScheduleName, processes: int, machine: Machine) -> MeasuredCell:
        known = {field: getattr(self, field) for field in MeasuredCell.model_fields if field in type(self).model_fields}
        devices = 1 if machine.device == "cpu" else min(machine.count, self.devices)
        place = {
            "partitions": partitions_of(name, self.devices),
            "balance": (),
            "devices": devices,
            "device": machine.device,
            "processes": processes,
            "transfer": "host" if machine.device != "cpu" and devices < self.devices else "direct",
            "variant": "dep-x-ptl" if machine.device == "cpu" or processes > 1 else "dep-str-ptl",
        }
        return MeasuredCell(**{**known, **place}, schedule=name)


_UNET: Final[dict[str, Any]] = {"model": "unet", "model_args": "depth=5;B=5;C=64;size=192"}
_AMOEBANET: Final[dict[str, Any]] = {"model": "amoebanet-d", "model_args": "L=36;D=256"}
_VIT: Final[dict[str, Any]] = {"model": "vit", "model_args": "L=32;D=1280"}

_SMALL: Final[dict[str, Any]] = {"profile": "h100", "chunks": (16,), "checkpoints": ("never",), "scaling": (32,)}
"""The same few cells in float32 with SGD, and in bfloat16 with AdamW."""

_HALF: Final[dict[str, Any]] = {**_SMALL, "precision": "bfloat16", "optimizer": "adamw"}

_SWEEPS: Final = {
    "amoebanet-d-h100": ScheduleSweep(**_AMOEBANET, profile="h100", batch_size=256, scaling=(2, 4, 16)),
    "amoebanet-d-p40": ScheduleSweep(**_AMOEBANET, scaling=(2, 4, 16)),
    "gpt2-h100": ScheduleSweep(model="gpt2", profile="h100", scaling=(2, 4), emulated=("never",)),
    "gpt2-p40": ScheduleSweep(model="gpt2", batch_size=64),
    "gpt2-xl-h100": ScheduleSweep(model="gpt2-xl", profile="h100", batch_size=64, scaling=(2, 4, 16, 32)),
    "gpt2-xl-h100-m16": ScheduleSweep(model="gpt2-xl", batch_size=64, **_SMALL),
    "gpt2-xl-h100-bfloat16": ScheduleSweep(model="gpt2-xl", batch_size=64, **_HALF),
    "gpt2-xl-p40": ScheduleSweep(model="gpt2-xl", batch_size=32, chunks=(16, 32)),
    "unet-h100": ScheduleSweep(**_UNET, profile="h100", batch_size=256, scaling=(2, 4, 16, 32, 64)),
    "unet-p40": ScheduleSweep(**_UNET, scaling=(2, 4, 16, 32, 64), emulated=("never",)),
    "vit-h100": ScheduleSweep(**_VIT, profile="h100", batch_size=256, scaling=(2, 4, 16, 32)),
    "vit-h100-m16": ScheduleSweep(**_VIT, batch_size=256, **_SMALL),
    "vit-h100-bfloat16": ScheduleSweep(**_VIT, batch_size=256, **_HALF),
    "vit-p40": ScheduleSweep(**_VIT),
}  # fmt: skip


class ScheduleComparison(Experiment):
    """Throughput, memory and bubble of every schedule; ``drawn`` is an experiment of its own."""

    verified: ClassVar[bool] = False

    simulated: Annotated[
        dict[str, ScheduleSweep], Field(max_length=64, description="in virtual time; a new sweep is a key of yours")
    ] = _SWEEPS
    drawn: Annotated[ScheduleSteps, Field(description="steps whose timelines are drawn")] = ScheduleSteps()
    measured: Annotated[MeasuredSchedules, Field(description="on this machine")] = MeasuredSchedules()

    def runs(self, machine: Machine) -> list[CellRun]:
        """What is measured on this machine."""
        return self.measured.runs(machine)

    def simulations(self) -> list[SimulatedCell]:
        """The cells of all sweeps, none twice."""
        return list({cell.id: cell for sweep in self.simulated.values() for cell in sweep.simulations()}.values())

    def emulations(self) -> list[EmulatedCell]:
        """The cells of all sweeps that are emulated, too, none twice."""
        return list({cell.id: cell for sweep in self.simulated.values() for cell in sweep.emulations()}.values())
