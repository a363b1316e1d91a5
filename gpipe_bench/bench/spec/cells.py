"""Cells: everything that decides one measurement, with an id that several experiments can share.

The id is the name of the file in which the raw results of the cell lie, so two experiments that ask for the same
cell share its runs, and a cell with any other setting has another file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from gpipe_bench.bench.spec.names import model_word
from gpipe_bench.bench.spec.settings import (
    AutoBalance,
    PipelineSettings,
    Problem,
    Seed,
    Steps,
    Tf32,
    Threads,
    Transfer,
    Variant,
    Warmup,
)
from gpipe_bench.components import Components
from gpipe_bench.schedules.table import is_schedule_file, shared_places
from gpipe_bench.util.nearest import nearest

RAW_PATTERN: Final = "results/raw/{cell}.json"
"""Where the raw results of a cell, or of cells that take turns, lie, whatever experiments asked for them."""

CELL_PATTERN: Final = r"[a-z][a-z0-9._-]*-[0-9a-f]{8}"
"""Regular expression of every cell id, and of every name of cells that take turns."""

# The types that PyTorch gives to devices which can train; it names no public list of them.
_DEVICE_TYPES: Final = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "privateuseone", "xpu")


def _device(value: Any) -> Any:
    if value not in _DEVICE_TYPES:
        raise ValueError(f"must be a type of device without index, got {value!r}; {nearest(str(value), _DEVICE_TYPES)}")
    return value


Device = Annotated[str, BeforeValidator(_device), Field(description="type of device, such as cpu or cuda")]
Devices = Annotated[
    int, Field(strict=True, ge=1, le=4096, description="distinct devices that the partitions share out")
]
Processes = Annotated[
    int,
    Field(strict=True, ge=1, le=4096, description="processes: 1, or one for each device of the schedule"),
]
Hosts = Annotated[int, Field(strict=True, ge=1, le=4096, description="hosts that share out the processes evenly")]


class PipelineCell(PipelineSettings):
    """What all cells have: model, pipeline and variant, a key, and the columns of their rows."""

    evidence: str
    variant: Variant
    transfer: Transfer = "direct"

    @property
    def components(self) -> Components:
        """The components that the variant names."""
        return Components.from_label(self.variant)

    @property
    @abstractmethod
    def place(self) -> str:
        """Where it runs, as a word of its key."""

    @cached_property
    def id(self) -> str:
        """The key: a readable name, unique by the first 8 digits of :attr:`config_sha256`."""
        schedule = [] if self.schedule in (None, "gpipe") else [self.schedule]
        schedule = [model_word(name) if is_schedule_file(name) else name for name in schedule]
        sizes = f"n{self.partitions}-m{self.chunks}-b{self.batch_size}"
        words = [self.evidence, model_word(self.model), self.variant, *schedule, sizes, self.place]
        return "-".join([*words, self.config_sha256[:8]])

    def columns(self) -> dict[str, Any]:
        """The columns of a row that the cell decides."""
        settings, schedule = self.settings(), self.schedule or "gpipe"
        found: dict[str, Any] = {name: settings[name] for name in _COLUMNS if name in settings}
        found |= {"evidence": self.evidence, "schedule": schedule, "microbatches": self.microbatches}
        found |= {"precision": "float32", "optimizer": "sgd"}
        return {**found, **asdict(self.components), "config_sha256": self.config_sha256, "cell": self.id}


_COLUMNS: Final = (
    *("model", "model_args", "variant", "backward", "transfer", "partitions", "chunks", "balance"),
    *("checkpoint", "batch_size", "seed", "processes", "hosts"),
)


class MeasuredSettings(PipelineSettings):
    """What is trained and how long it is measured; the defaults are for two CPU cores."""

    threads: Threads = 1
    tf32: Tf32 = False
    warmup: Warmup = 1
    steps: Steps = 5
    seed: Seed = 0


class MeasuredCell(MeasuredSettings, PipelineCell):
    """One measurement, but for its repeats."""

    balance: AutoBalance = (9, 21, 13, 10)
    evidence: Literal["measured"] = "measured"
    variant: Variant = "dep-x-ptl"
    device: Device = "cpu"
    devices: Devices = 1
    processes: Processes = 1
    hosts: Hosts = 1

    @property
    def place(self) -> str:
        """The type of device, and the processes if there are several."""
        return f"p{self.processes}-{self.device}" if self.processes > 1 else self.device

    @property
    def accelerators(self) -> int:
        """How many it needs; a CPU is none."""
        return 0 if self.device == "cpu" else self.devices

    def settings(self) -> dict[str, Any]:
        """All settings as plain data; one process and one host are left out, so that older cells keep their keys."""
        data = super().settings()
        return {name: value for name, value in data.items() if name not in ("processes", "hosts") or value != 1}

    def places(self) -> list[str]:
        """A device for each one of the schedule, as its host names it: neighbours share one when there are too few."""
        shared, each = shared_places(self.schedule_devices, self.devices), max(1, self.devices // self.hosts)
        return ["cpu" if self.device == "cpu" else f"{self.device}:{k % each}" for k in shared]

    def placement(self) -> list[str]:
        """The device of each partition."""
        places = self.places()
        return [places[k] for k in self.homes()]

    def unsupported(self) -> str:
        """Why this cell cannot be measured on its device, known before PyTorch is loaded; empty when it can."""
        instead = self.stand_in
        if self.processes > 1 and instead != self.variant:
            return f"processes of one pipeline have no switches, and no copy streams; see variant {instead}"
        if self.schedule and not self.components.fork_join:
            rule = "fork_join must be on with a schedule"
            return f"{rule}, which has no Fork and Join to switch off, see variant {instead}"
        if instead != self.variant:
            return f"copy_streams needs an accelerator; on cpu it changes nothing, see variant {instead}"
        return ""

    @property
    def stand_in(self) -> str:
        """The variant to look at in place of this one: itself where the cell can run."""
        if self.processes > 1:
            return Components(copy_streams=False).label
        # Only accelerators have copy streams, and a schedule has no Fork and Join to switch off.
        changes = {"copy_streams": False} if self.device == "cpu" else {}
        changes |= {"fork_join": True} if self.schedule else {}
        return replace(self.components, **changes).label

    def problems(self) -> Iterator[Problem]:
        """Rules of every cell, and as many devices as partitions can fill."""
        yield from super().problems()
        most = 1 if self.device == "cpu" else self.schedule_devices
        if self.devices > most:
            text = f"must be at most {most} for {self.partitions} partitions on {self.device}, got {self.devices}"
            yield Problem(("devices", "partitions", "device", "schedule"), f"{text}; lower it")
        yield from self._process_problems()

    def _process_problems(self) -> Iterator[Problem]:
        p = self.schedule_devices
        if self.processes > 1:
            if self.processes != p:
                what = f"{self.partitions} partitions of {self.schedule or 'any schedule'}"
                text = f"must be 1, or {p} for {what}, got {self.processes}"
                yield Problem(("processes", "partitions", "schedule"), f"{text}; change processes or partitions")
            if not self.schedule:
                text = f"must be given where there are {self.processes} processes, got none"
                yield Problem(("schedule", "processes"), f"{text}; use gpipe, or another one")
            if self.transfer != "direct":
                text = f"must be direct where there are {self.processes} processes, got {self.transfer}"
                yield Problem(("transfer", "processes"), f"{text}; set transfer to direct")
        shared = {"processes": self.processes} | ({} if self.device == "cpu" else {"devices": self.devices})
        for name, count in shared.items():
            if count % self.hosts:
                text = f"must be the same number on each of {self.hosts} hosts, got {count}"
                yield Problem((name, "hosts"), f"{text}; change {name} or hosts")


class CellRun(NamedTuple):
    """One repeat of a cell, each in a fresh process.

    Attributes:
        cell: what is measured.
        repeat: 0-based.
        turns: name of the cells with which it takes turns; empty where it has the machine to itself.
    """

    cell: MeasuredCell
    repeat: int
    turns: str = ""

    @property
    def job(self) -> str:
        """Name of the job that measures it, with all repeats of all cells that take turns."""
        return self.turns or self.cell.id

    @property
    def path(self) -> Path:
        """Where its raw result lies beside the others of its job, below the folder of the run."""
        return Path(RAW_PATTERN.format(cell=self.job))
