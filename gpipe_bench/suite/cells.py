"""Cells: everything that decides one measurement, with an id that several experiments can share.

The id is the name of the file in which the raw results of the cell lie, so two experiments that ask for the same
cell share its runs, and a cell with any other setting has another file.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

from pydantic import model_validator

from gpipe_bench.components import Components
from gpipe_bench.errors import ConfigError, ScheduleError
from gpipe_bench.models.table import format_arguments, model_digest, model_spec, parse_arguments
from gpipe_bench.results.configurations import digest
from gpipe_bench.schedules import table
from gpipe_bench.schedules.table import (
    TWO_PER_DEVICE,
    device_count,
    file_schedule,
    is_schedule_file,
    shared_devices,
)
from gpipe_bench.settings import (
    BatchSize,
    Checkpoint,
    Chunks,
    Hosts,
    Partitions,
    Processes,
    Seed,
    Setting,
    Steps,
    Threads,
    Transfer,
    Warmup,
    switch,
    whole,
)
from gpipe_bench.suite.names import model_word
from gpipe_bench.suite.settings import (
    AUTO,
    AutoBalance,
    Model,
    ModelArgs,
    ModelSection,
    OptionalSchedule,
    Problem,
    Variant,
    read_balance,
)
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


Device = Annotated[str, Setting("type of device, such as cpu or cuda", _device, {"type": "string"})]
Devices = Annotated[int, whole("distinct devices that the partitions share out", most=4096)]
Tf32 = Annotated[bool, switch("let CUDA round float32 products to TF32; published runs had none")]


class Cell(ModelSection):
    """What is trained in which pipeline, for one kind of evidence; it has a key, and columns of rows.

    The defaults are a small U-Net.
    """

    model: Model = "unet"
    model_args: ModelArgs = "depth=4;B=1;C=16;size=64"
    batch_size: BatchSize = 8
    chunks: Chunks = 4
    partitions: Partitions = 4
    balance: AutoBalance = (9, 21, 13, 10)
    checkpoint: Checkpoint = "except_last"
    schedule: OptionalSchedule = None
    evidence: str
    variant: Variant
    transfer: Transfer = "direct"

    @model_validator(mode="before")
    @classmethod
    def _implied(cls, data: Any) -> Any:
        """A balance says how many partitions there are, or the file of a schedule, which says the chunks, too.

        ``backward`` of older files says whether there is a schedule.
        """
        if not isinstance(data, dict):
            return data
        data = dict(data)
        with suppress(ValueError):
            if data.get("balance", AUTO) not in (AUTO, (), []) and "partitions" not in data:
                data["partitions"] = len(read_balance(data["balance"]))
        schedule = data.get("schedule")
        if is_schedule_file(schedule):
            with suppress(ScheduleError):
                own = file_schedule(schedule)
                data = {"chunks": own.microbatches, "partitions": own.partitions, **data}
        match data.get("backward"):
            case "autograd" if schedule in (None, "gpipe"):
                del data["backward"]
                data["schedule"] = None
            case "scheduled":
                data["schedule"] = schedule or "gpipe"
                del data["backward"]
        return data

    @property
    def backward(self) -> str:
        """What orders the backward pass: ``scheduled`` with a schedule, else ``autograd``."""
        return "autograd" if self.schedule is None else "scheduled"

    @property
    def microbatches(self) -> int:
        """m, as ``Tensor.chunk`` splits the batch: equal micro-batches but for the last, perhaps fewer than asked."""
        size = -(-self.batch_size // self.chunks)
        return -(-self.batch_size // size)

    @property
    def schedule_devices(self) -> int:
        """p, how many devices the schedule has: one for each partition, or one for two partitions."""
        return device_count(self.schedule, self.partitions)

    @property
    def placement(self) -> tuple[int, ...]:
        """For each partition its rank: its device of the schedule, from 0 to p - 1."""
        return table.placement(self.schedule, self.partitions)

    def settings(self) -> dict[str, Any]:
        """All settings as plain data, arguments of the model in canonical form; a model of one's own with its files.

        ``backward`` says whether there is a schedule, and that of GPipe has no name: cells keep their keys.
        """
        data = self.model_dump(mode="json", exclude={"schedule"} if self.schedule in (None, "gpipe") else None)
        data["backward"] = self.backward
        if files := model_digest(self.model):
            data["model_files"] = files
        if self.schedule is not None and is_schedule_file(self.schedule):
            data["schedule_file"] = digest(Path(self.schedule).read_text(encoding="utf-8", errors="replace"))[:16]
        # The arguments are normalised by the table of models: their order and left-out defaults do not matter.
        data["model_args"] = format_arguments(parse_arguments(self.model, self.model_args))
        return data

    def problems(self) -> Iterator[Problem]:
        """The schedule fits; the model is known, takes these arguments, and has the layers that a balance hands out."""
        if self.schedule in TWO_PER_DEVICE and self.partitions % 2:
            rule = f"must be even where schedule is {self.schedule}, two on each device, got {self.partitions}"
            yield Problem(("partitions", "schedule"), f"{rule}; add one, or take one away")
        if self.schedule is not None and is_schedule_file(self.schedule):
            own = file_schedule(self.schedule)
            if (own.microbatches, own.partitions) != (self.microbatches, self.partitions):
                rule = f"must be for {self.microbatches} micro-batches and {self.partitions} partitions"
                got = f"one for {own.microbatches} and {own.partitions} in {self.schedule}"
                text = f"{rule}, got {got}; change chunks, batch_size or partitions"
                yield Problem(("schedule", "chunks", "partitions", "batch_size"), text)
                return
        split = "-".join(map(str, self.balance))
        if self.balance and len(self.balance) != self.partitions:
            rule = f"must have one entry per partition, {self.partitions}, got {len(self.balance)} in {split}"
            yield Problem(("balance", "partitions"), f"{rule}; change balance or partitions")
        fields: tuple[str, ...] = ("model",)
        try:
            spec = model_spec(self.model)
            fields = "model_args", "model"
            arguments = parse_arguments(self.model, self.model_args)
            fields = "model", "model_args"
            layers = spec.layers(arguments)
            # A model of one's own may lack what makes its batch.
            spec.input_shape(arguments)
        except ConfigError as error:
            for text in error.problems:
                yield Problem(fields, text.removeprefix("model ") if fields[0] == "model" else text)
            return
        if self.partitions > layers:
            rule = f"must be at most the {layers} layers of {self.model}, got {self.partitions}"
            yield Problem(("partitions", "model", "model_args"), f"{rule}; lower it")
        elif self.balance and sum(self.balance) != layers:
            rule = f"must sum to the {layers} layers of {self.model}, got {split}, which sums to {sum(self.balance)}"
            yield Problem(("balance", "model", "model_args"), f"{rule}; change its entries")

    @property
    def components(self) -> Components:
        """The components that the variant names."""
        return Components.from_label(self.variant)

    @property
    @abstractmethod
    def key_word(self) -> str:
        """Where it runs, as a word of its key."""

    @cached_property
    def id(self) -> str:
        """The key: a readable name, unique by the first 8 digits of :attr:`config_sha256`."""
        schedule = [] if self.schedule in (None, "gpipe") else [self.schedule]
        schedule = [model_word(name) if is_schedule_file(name) else name for name in schedule]
        sizes = f"n{self.partitions}-m{self.chunks}-b{self.batch_size}"
        words = [self.evidence, model_word(self.model), self.variant, *schedule, sizes, self.key_word]
        return "-".join([*words, self.config_sha256[:8]])

    def columns(self) -> dict[str, Any]:
        """The columns of a row that the cell decides."""
        settings, schedule = self.settings(), self.schedule or "gpipe"
        found: dict[str, Any] = {name: settings[name] for name in _COLUMNS if name in settings}
        found |= {"evidence": self.evidence, "schedule": schedule, "microbatches": self.microbatches}
        found |= {"precision": "float32", "optimizer": "sgd"}
        # Whether copies of skips are shared only the variant says.
        found |= {name: getattr(self.components, name) for name in Components.switched()}
        return {**found, "config_sha256": self.config_sha256, "cell": self.id}


_COLUMNS: Final = (
    *("model", "model_args", "variant", "backward", "transfer", "partitions", "chunks", "balance"),
    *("checkpoint", "batch_size", "seed", "processes", "hosts"),
)


def cut_problems(section: Any, partitions: int, balance: tuple[int, ...] = (), **order: Any) -> Iterator[Problem]:
    """Why the model of a section cannot be cut so, and run in this order."""
    names = {"model": section.model, "model_args": section.model_args, **order}
    yield from Cell.problems(MeasuredCell.model_construct(**names, partitions=partitions, balance=balance))


class MeasuredCell(Cell):
    """One measurement, but for its repeats; the defaults are for two CPU cores."""

    threads: Threads = 1
    tf32: Tf32 = False
    warmup: Warmup = 1
    steps: Steps = 5
    seed: Seed = 0
    evidence: Literal["measured"] = "measured"
    variant: Variant = "dep-x-ptl"
    device: Device = "cpu"
    devices: Devices = 1
    processes: Processes = 1
    hosts: Hosts = 1

    @property
    def key_word(self) -> str:
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

    def torch_devices(self) -> list[str]:
        """A device for each one of the schedule, as its host names it: neighbours share one when there are too few."""
        shared, each = shared_devices(self.schedule_devices, self.devices), max(1, self.devices // self.hosts)
        return ["cpu" if self.device == "cpu" else f"{self.device}:{k % each}" for k in shared]

    def partition_devices(self) -> list[str]:
        """The device of each partition."""
        devices = self.torch_devices()
        return [devices[rank] for rank in self.placement]

    def unsupported(self) -> str:
        """Why this cell cannot be measured on its device, known before PyTorch is loaded; empty when it can."""
        instead = self.stand_in
        if self.processes > 1 and instead != self.variant:
            return f"processes of one pipeline have no switch but shared, and no copy streams; see variant {instead}"
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
            return Components(copy_streams=False, shared=self.components.shared).label
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
