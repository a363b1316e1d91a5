"""Cells: everything that decides one measurement, with an id that several experiments can share.

The id is the name of the folder in which the raw results of the cell lie, so two experiments that ask for the same
cell share its runs, and a cell with any other setting has another folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from gpipe_bench.bench.machine import Machine, find_machine
from gpipe_bench.bench.problems import Problem
from gpipe_bench.bench.settings import CellSettings, Variant, options
from gpipe_bench.bench.standins import without_copy_streams
from gpipe_bench.components import Components
from models.arguments import nearest

if TYPE_CHECKING:
    from gpipe_bench.bench.config import SuiteConfig

__all__ = ["CELL_PATTERN", "RAW_PATTERN", "Cell", "CellRun", "experiment_cells"]

RAW_PATTERN: Final = "results/raw/{cell}/{repeat}.json"
"""Where the raw result of a run lies, whatever experiment asked for it."""

CELL_PATTERN: Final = r"[a-z][a-z0-9._-]*-[0-9a-f]{8}"
"""Regular expression of every cell id."""

# The types that PyTorch gives to devices which can train; it names no public list of them.
_DEVICE_TYPES: Final = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "privateuseone", "xpu")


def _device(value: Any) -> Any:
    if value not in _DEVICE_TYPES:
        raise ValueError(f"must be a type of device without index, got {value!r}; {nearest(str(value), _DEVICE_TYPES)}")
    return value


Device = Annotated[str, BeforeValidator(_device), Field(description="type of device, such as cpu or cuda")]
Devices = Annotated[int, Field(strict=True, ge=1, description="distinct devices that the partitions share out")]
Transfer = Annotated[
    Literal["direct", "host"], Field(description="how tensors cross partitions: direct, or host for pinned memory")
]
Evidence = Annotated[Literal["measured"], Field(description="how the values come about")]


class Cell(CellSettings):
    """One measurement, but for its repeats."""

    evidence: Evidence = "measured"
    variant: Variant = "dep-x-ptl"
    transfer: Transfer = "direct"
    device: Device = "cpu"
    devices: Devices = 1

    @property
    def components(self) -> Components:
        """The components that the variant names."""
        return Components.from_label(self.variant)

    @property
    def id(self) -> str:
        """Readable name, unique by the first 8 digits of :attr:`config_sha256`."""
        size = f"n{self.partitions}-m{self.chunks}-b{self.batch_size}"
        return f"{self.evidence}-{self.model}-{self.variant}-{size}-{self.device}-{self.config_sha256[:8]}"

    def arguments(self) -> list[str]:
        """The cell as options of ``python -m gpipe_bench run``, one word each."""
        return options({name: value for name, value in self.settings().items() if name != "evidence"})

    def placement(self) -> list[str]:
        """The device of each partition: neighbours share one when there are fewer devices than partitions."""
        if self.device == "cpu":
            return ["cpu"] * self.partitions
        return [f"{self.device}:{j * self.devices // self.partitions}" for j in range(self.partitions)]

    def unsupported(self) -> str:
        """Why this cell cannot be measured on its device, known before PyTorch is loaded; empty when it can."""
        if self.device == "cpu" and self.components.copy_streams:
            stand_in = without_copy_streams(self.variant)
            return f"copy_streams needs an accelerator; on cpu it changes nothing, see variant {stand_in}"
        return ""

    def problems(self) -> Iterator[Problem]:
        """Rules of every cell, and as many devices as partitions can fill."""
        yield from super().problems()
        most = 1 if self.device == "cpu" else self.partitions
        if self.devices > most:
            text = f"must be at most {most} for {self.partitions} partitions on {self.device}, got {self.devices}"
            yield Problem(("devices", "partitions", "device"), f"{text}; lower it")


class CellRun(NamedTuple):
    """One repeat of a cell, each in a fresh process."""

    cell: Cell
    repeat: int

    @property
    def path(self) -> Path:
        """Where its raw result lies, below the folder of the run."""
        return Path(RAW_PATTERN.format(cell=self.cell.id, repeat=self.repeat))


def experiment_cells(config: SuiteConfig, experiment: str, device: Machine | str | None = None) -> list[CellRun]:
    """The runs that an experiment asks for on this machine, published variants first, none twice.

    Args:
        config: the suite's configuration.
        experiment: name of an experiment in it.
        device: where to measure: a machine, or ``auto``, ``cpu`` or ``cuda``; the configuration's choice by default.

    Raises:
        ConfigError: no such experiment.
        DeviceCountError: ``cuda`` was asked for and there is no GPU.
    """
    machine = device if isinstance(device, Machine) else find_machine(device or config.device)
    runs = config.experiment(experiment).runs(machine)
    return list({(run.cell.id, run.repeat): run for run in runs}.values())
