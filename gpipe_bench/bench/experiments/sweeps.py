"""Sweeps: one model over numbers of partitions and micro-batches, in every checkpoint mode.

    at a fixed batch         more chunks make smaller micro-batches: a smaller bubble, less efficient kernels
    at a fixed micro-batch   more chunks make a larger batch: what the bubble costs and nothing else

A new sweep is a key below ``sweep.simulated`` with what differs from the defaults.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field, PlainSerializer, WithJsonSchema

from gpipe_bench.bench.spec.cells import CellRun, Hosts, MeasuredCell
from gpipe_bench.bench.spec.emulated_cells import MOST_DEVICES, EmulatedCell
from gpipe_bench.bench.spec.experiment import Experiment
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.spec.settings import (
    BALANCE_SCHEMA,
    ChunkCounts,
    Count,
    Model,
    ModelArgs,
    ModelSection,
    Modes,
    Problem,
    Schedule,
    Seed,
    Steps,
    Threads,
    Variant,
    Warmup,
    cut_problems,
    each_valid,
    read_balance,
)
from gpipe_bench.bench.spec.simulated_cells import Flavour, Optimizer, Profile, SimulatedCell
from gpipe_bench.schedules.table import device_count

Counts = Annotated[
    tuple[Count, ...], Field(min_length=1, max_length=64, description="numbers of partitions, one device each")
]
FixedBatch = Annotated[
    int, Field(strict=True, ge=0, le=10**9, description="samples per step at a fixed batch; 0: not swept")
]
FixedMicrobatch = Annotated[
    int,
    Field(strict=True, ge=0, le=10_000, description="samples of a micro-batch at a fixed micro-batch; 0: not swept"),
]
Repeats = Annotated[int, Field(strict=True, ge=1, le=1000, description="runs of each cell, each in a fresh process")]


def _balances(value: Any) -> Any:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"must be a list of balances like [53, 30-23], got {value!r}; give one per number of devices")
    return tuple(each_valid(value, read_balance))


Balances = Annotated[
    tuple[tuple[int, ...], ...],
    BeforeValidator(_balances),
    PlainSerializer(lambda all_: ["-".join(map(str, sizes)) for sizes in all_], return_type=list[str]),
    WithJsonSchema({"type": "array", "minItems": 1, "maxItems": 64, "items": BALANCE_SCHEMA}),
    Field(max_length=64, description="one per number of partitions"),
]


_POINT: Final = re.compile(r"n(\d{1,3})-m(\d{1,5})-b(\d{1,9})-(always|except_last|never)")


def _points(value: Any) -> Any:
    return tuple(each_valid(value, _point)) if isinstance(value, list | tuple) else value


def _point(word: Any) -> str:
    parts = _POINT.fullmatch(str(word))
    if not parts:
        raise ValueError(
            f"must have cells like n4-m16-b256-always, got {word!r}; write partitions, chunks, batch, mode"
        )
    if int(parts[1]) > MOST_DEVICES:
        raise ValueError(f"must have cells of at most {MOST_DEVICES} partitions, got {word!r}; leave it out")
    return str(word)


Points = Annotated[
    tuple[str, ...],
    BeforeValidator(_points),
    WithJsonSchema({"type": "array", "maxItems": 64, "items": {"type": "string", "pattern": f"^{_POINT.pattern}$"}}),
    Field(max_length=64, description="which cells are emulated, too"),
]


class _Grid(ModelSection, Experiment):
    """What both kinds of sweep share."""

    model: Model = "unet"
    model_args: ModelArgs = "depth=5;B=5;C=64;size=192"
    chunks: ChunkCounts = (1, 2, 4, 8, 16, 32, 64, 128)
    checkpoints: Modes = ("always", "except_last", "never")
    batch_size: FixedBatch = 256
    microbatch_size: FixedMicrobatch = 8

    def problems(self) -> Iterator[Problem]:
        """There is a series, and the batch can be cut into as many micro-batches as are asked for."""
        if not self.batch_size and not self.microbatch_size:
            text = "must be at least 1 where microbatch_size is 0, got 0 for both; set one of them"
            yield Problem(("batch_size", "microbatch_size"), text)
        if self.batch_size and max(self.chunks) > self.batch_size:
            text = f"must be at most batch_size = {self.batch_size}, got {max(self.chunks)}; lower it or raise that"
            yield Problem(("chunks", "batch_size"), text)

    def points(self) -> Iterator[tuple[int, int, str]]:
        """(chunks, batch size, checkpoint mode) of every cell; a batch of both series comes twice."""
        for mode, chunks in product(self.checkpoints, self.chunks):
            sizes = [self.batch_size] if self.batch_size else []
            sizes += [self.microbatch_size * chunks] if self.microbatch_size else []
            yield from ((chunks, size, mode) for size in sizes)


class SimulatedSweep(_Grid):
    """In virtual time, on as many devices as are asked for."""

    partitions: Counts = (1, 2, 4, 8, 16, 32, 64)
    variant: Variant = "dep-str-ptl"
    optimizer: Optimizer = "sgd"
    profile: Profile = "p40"
    flavour: Flavour = "current"
    emulated: Points = ()

    def problems(self) -> Iterator[Problem]:
        """Rules of a sweep, and of the pipeline with the most partitions."""
        yield from super().problems()
        yield from cut_problems(self, max(self.partitions))

    def simulations(self) -> list[SimulatedCell]:
        """A cell per point and number of partitions, none twice."""
        shared = {**self.shared(SimulatedCell), "balance": "auto"}
        cells = [
            SimulatedCell.model_validate(
                {**shared, "partitions": n, "chunks": chunks, "batch_size": size, "checkpoint": mode}
            )
            for n in self.partitions
            for chunks, size, mode in self.points()
        ]
        return list({cell.id: cell for cell in cells}.values())

    def emulations(self) -> list[EmulatedCell]:
        """The simulated cells whose names are among :attr:`emulated`."""
        return [
            EmulatedCell(**{**cell.shared(EmulatedCell), "evidence": "emulated"})
            for cell in self.simulations()
            if f"n{cell.partitions}-m{cell.chunks}-b{cell.batch_size}-{cell.checkpoint}" in self.emulated
        ]


class MeasuredSweep(_Grid):
    """On the devices of this machine, as far as they go."""

    model_args: ModelArgs = "depth=4;B=1;C=16;size=64"
    balances: Balances = ((53,), (25, 28), (9, 21, 13, 10))
    variant: Variant = "dep-x-ptl"
    threads: Threads = 1
    warmup: Warmup = 1
    steps: Steps = 5
    seed: Seed = 0
    repeats: Repeats = 1

    def problems(self) -> Iterator[Problem]:
        """Rules of a sweep, and of the pipeline with each balance."""
        yield from super().problems()
        for sizes in self.balances:
            for problem in cut_problems(self, len(sizes), sizes, **self.order()):
                names = tuple("balances" if name in ("balance", "partitions") else name for name in problem.fields)
                yield Problem(names, problem.text)

    def order(self) -> dict[str, Any]:
        """The settings of schedule and backward pass; by default those of a cell."""
        return {}

    def place(self, machine: Machine, n: int) -> dict[str, Any]:
        """Settings of where ``n`` partitions run."""
        # On a CPU tensors stay where they are; the ablation stages them, and its cells are shared.
        cpu = machine.device == "cpu"
        return {"transfer": "host" if cpu and n > 1 else "direct", "devices": 1 if cpu else n}

    def runs(self, machine: Machine) -> list[CellRun]:
        """A run per repeat, point and balance, none twice; on GPUs of balances that they suffice for."""
        shared = {**self.shared(MeasuredCell), "device": machine.device}
        runs = []
        for sizes in self.balances:
            n = len(sizes)
            if machine.device != "cpu" and n > machine.count:
                continue
            place = {**shared, "partitions": n, "balance": sizes, **self.order(), **self.place(machine, n)}
            for chunks, size, mode in dict.fromkeys(self.points()):
                cell = MeasuredCell.model_validate({**place, "chunks": chunks, "batch_size": size, "checkpoint": mode})
                runs += [CellRun(cell, repeat) for repeat in range(self.repeats)]
        return runs


class CpuSweep(MeasuredSweep):
    """Small, with few numbers of partitions and micro-batches."""

    chunks: ChunkCounts = (1, 4)
    batch_size: FixedBatch = 8
    microbatch_size: FixedMicrobatch = 2
    repeats: Repeats = 2


class CudaSweep(MeasuredSweep):
    """U-Net (5, 64) on as many GPUs as there are."""

    model_args: ModelArgs = "depth=5;B=5;C=64;size=192"
    balances: Balances = ((241,), (104, 137), (30, 66, 84, 61), (16, 27, 31, 44, 22, 57, 27, 17))
    variant: Variant = "dep-str-ptl"
    chunks: ChunkCounts = (1, 4, 16, 32)
    batch_size: FixedBatch = 128
    microbatch_size: FixedMicrobatch = 8
    warmup: Warmup = 2
    repeats: Repeats = 3


class ProcessSweep(MeasuredSweep):
    """A process for each device of the schedule: one or several, on one host or several."""

    model: Model = "gpt2"
    model_args: ModelArgs = "L=6;D=96;heads=4;vocabulary=64;context=64;dropout=0"
    balances: Balances = ((14,), (7, 7), (5, 4, 5), (4, 3, 3, 4))
    schedule: Schedule = "1f1b"
    hosts: Hosts = 1
    chunks: ChunkCounts = (4, 16)
    checkpoints: Modes = ("never",)
    batch_size: FixedBatch = 32
    microbatch_size: FixedMicrobatch = 0
    repeats: Repeats = 2

    def problems(self) -> Iterator[Problem]:
        """Rules of a sweep, and as many processes on each host."""
        yield from super().problems()
        for count in {device_count(self.schedule, len(sizes)) for sizes in self.balances} - {1}:
            if count % self.hosts:
                text = f"must give one process, or as many on each of {self.hosts} hosts, got {count}"
                yield Problem(("balances", "hosts", "schedule"), f"{text}; change balances or hosts")

    def order(self) -> dict[str, Any]:
        """The schedule."""
        return {"schedule": self.schedule}

    def place(self, machine: Machine, n: int) -> dict[str, Any]:
        """Each process has a device of its own."""
        processes = device_count(self.schedule, n)
        devices = 1 if machine.device == "cpu" else processes
        return {"processes": processes, "hosts": self.hosts if processes > 1 else 1, "devices": devices}
