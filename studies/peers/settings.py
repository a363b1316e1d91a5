"""Settings of the race of peers. Imports no PyTorch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Annotated, Any, Final

from pydantic import Field

from gpipe_bench.errors import ConfigError
from gpipe_bench.measure.host import cpu_count
from gpipe_bench.settings import BatchSize, Checkpoint, Chunks, Partitions, Seed, whole
from gpipe_bench.suite.machine import Machine
from gpipe_bench.suite.settings import Problem, Section
from gpipe_bench.suite.validation import validated
from studies.peers.cases import PeerCase
from studies.peers.contenders import contenders_of
from studies.peers.workloads import RACED, raced_arguments

Contenders = Annotated[
    tuple[str, ...], Field(min_length=1, max_length=64, description="who takes part; all: everybody")
]
Counts = Annotated[
    tuple[Partitions, ...], Field(min_length=1, max_length=64, description="numbers of partitions, a layer each")
]
ChunkCounts = Annotated[tuple[Chunks, ...], Field(min_length=1, max_length=64, description="numbers of micro-batches")]
Modes = Annotated[tuple[Checkpoint, ...], Field(min_length=1, max_length=3, description="checkpoint modes")]
Width = Annotated[int, whole("features of a layer", most=65_536)]
Rounds = Annotated[int, whole("rounds; in each, every contender runs once", most=10_000)]
Visit = Annotated[
    float, Field(gt=0, le=3600, description="seconds of a contender's timed steps in a round; at least one step")
]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Tolerance = Annotated[float, Field(gt=0, le=1, description="relative difference up to which gradients are equal")]


class CellsRace(Section):
    """Tiny layers: what a (micro-batch, partition) cell costs the host."""

    partitions: Counts = (1, 2, 4, 8)
    chunks: ChunkCounts = (8, 32, 64)
    checkpoints: Modes = ("always", "except_last", "never")
    width: Width = 4
    rounds: Rounds = 8
    visit_s: Visit = 0.1

    def cases(self, shared: dict[str, Any]) -> Iterator[PeerCase]:
        """A case per n, m and mode: a layer per partition, micro-batches of two samples."""
        for mode, n, m in product(self.checkpoints, self.partitions, self.chunks):
            yield PeerCase(
                workload="cells", model="tiny", model_args=f"L={n};width={self.width}", partitions=n, chunks=m,
                checkpoint=mode, batch_size=2 * m, balance=(1,) * n, rounds=self.rounds, visit_s=self.visit_s, **shared,
            )  # fmt: skip


class NetworkRace(Section):
    """A network that computes; its partitions are balanced by measured time."""

    model: Annotated[str, Field(description="name of the model")] = "convnet"
    model_args: Annotated[str, Field(description="arguments of the model, 'key=value' joined by ';'")] = (
        "L=9;C=64;size=32"
    )
    batch_size: BatchSize = 32
    chunks: Chunks = 8
    partitions: Partitions = 2
    checkpoints: Modes = ("always", "never")
    rounds: Rounds = 20
    visit_s: Visit = 0.5

    def problems(self) -> Iterator[Problem]:
        """The race knows the model, and micro-batches are equal."""
        if self.model not in RACED:
            yield Problem(("model",), f"must be one of {', '.join(RACED)}, got {self.model!r}; use one of them")
            return
        try:
            layers = RACED[self.model].layers(raced_arguments(self.model, self.model_args))
        except ConfigError as error:
            yield from (Problem(("model_args", "model"), text) for text in error.problems)
            return
        if 2 * self.partitions > layers:  # some contenders have two partitions per device
            text = f"must be at most half the {layers} layers of {self.model}, got {self.partitions}; lower it"
            yield Problem(("partitions", "model_args"), text)
        if self.batch_size % self.chunks:
            text = f"must be a multiple of chunks = {self.chunks}, got {self.batch_size}; change either"
            yield Problem(("batch_size", "chunks"), text)

    def cases(self, workload: str, shared: dict[str, Any]) -> Iterator[PeerCase]:
        """A case per mode."""
        own = self.model_dump(exclude={"checkpoints"})
        for mode in self.checkpoints:
            yield PeerCase(workload=workload, checkpoint=mode, **own, **shared)


class UNetRace(NetworkRace):
    """A U-Net, whose skips cross the boundary."""

    model: str = "unet"
    model_args: str = "depth=3;B=5;C=32;size=32;dropout=0"
    visit_s: Visit = 1.0


class DecoderRace(NetworkRace):
    """The decoder of a transformer."""

    model: str = "gpt2"
    model_args: str = "L=6;D=96;heads=4;vocabulary=64;context=64;dropout=0"


class Settings(Section):
    """The engine beside other pipelines and the plain module."""

    contenders: Contenders = ("all",)
    seed: Seed = 0
    timeout_s: Annotated[Seconds, Field(description="seconds that a contender may take for one answer")] = 60.0
    balance_s: Annotated[Seconds, Field(description="seconds in which the layers of a network are timed")] = 3.0
    tolerance: Tolerance = 1e-9
    cells: CellsRace = CellsRace()
    convnet: NetworkRace = NetworkRace()
    unet: UNetRace = UNetRace()
    decoder: DecoderRace = DecoderRace()

    def problems(self) -> Iterator[Problem]:
        """Contenders exist."""
        try:
            contenders_of(self.contenders)
        except ConfigError as error:
            yield from (Problem(("contenders",), text.removeprefix("contender ")) for text in error.problems)

    def cases(self, machine: Machine) -> list[PeerCase]:
        """All cases on the devices of ``machine``."""
        shared = {"seed": self.seed, "device": machine.device, "devices": machine.count, "cores": cpu_count()}
        networks = {"convnet": self.convnet, "unet": self.unet, "decoder": self.decoder}
        return [
            *self.cells.cases(shared),
            *(case for name, network in networks.items() for case in network.cases(name, shared)),
        ]


_TINY: Final[dict[str, Any]] = {"batch_size": 8, "chunks": 4, "rounds": 3, "visit_s": 0.01}
_FEW: Final[dict[str, Any]] = {"checkpoints": ["always"], "rounds": 8, "visit_s": 0.1}
_ONCE: Final[dict[str, Any]] = {"chunks": 4, "checkpoints": ["always"], "rounds": 3, "visit_s": 0.01}
PRESETS: Final[Mapping[str, dict[str, Any]]] = {
    "full": {},
    # A minute and a half on one GPU, by the side of other measurements.
    "short": {
        "contenders": ["engine-autograd", "engine-scheduled", "torchgpipe", "plain", "loop"],
        "balance_s": 1.0,
        "cells": {"partitions": [4], "chunks": [8], "checkpoints": ["always", "never"]},
        **dict.fromkeys(("convnet", "unet", "decoder"), _FEW),
    },
    # The whole path in seconds, for a rehearsal: its numbers mean nothing.
    "quick": {
        "balance_s": 0.1,
        "cells": {"partitions": [2], **_ONCE, "chunks": [4]},
        "convnet": {"model_args": "L=2;C=4;size=8", "checkpoints": ["never"], **_TINY},
        "unet": {"model_args": "depth=2;B=1;C=4;size=16;dropout=0", "checkpoints": ["always"], **_TINY},
        "decoder": {
            "model_args": "L=1;D=8;heads=2;vocabulary=8;context=4;dropout=0", "checkpoints": ["always"], **_TINY,
        },
    },
}  # fmt: skip
"""Settings by name that others may be put over."""


def read_settings(data: Mapping[str, Any], preset: str = "full") -> Settings:
    """The settings in plain data over a preset; what is left out has its default.

    Raises:
        ConfigError: settings are wrong; carries all problems.
    """
    merged = dict(PRESETS[preset])
    for key, value in data.items():
        old = merged.get(key)
        merged[key] = {**old, **value} if isinstance(old, dict) and isinstance(value, Mapping) else value
    return validated(Settings, merged, lambda path: f"peers: {'.'.join(path)}")
