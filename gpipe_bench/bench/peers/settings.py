"""Settings of the race of peers. Imports no PyTorch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Final

from pydantic import Field

from gpipe_bench.bench.peers.cases import PeerCase
from gpipe_bench.bench.peers.contenders import contenders_of
from gpipe_bench.bench.peers.workloads import RACED, raced_arguments
from gpipe_bench.bench.spec.machine import Machine
from gpipe_bench.bench.spec.problems import Problem
from gpipe_bench.bench.spec.settings import (
    BatchSize,
    ChunkCounts,
    Chunks,
    Count,
    Model,
    ModelArgs,
    Modes,
    Partitions,
    Section,
    Seed,
    no_boolean,
)
from gpipe_bench.bench.spec.variants import Variants, labels_of
from gpipe_bench.errors import ConfigError
from gpipe_bench.measure.host import cpu_count
from gpipe_bench.models.arguments import nearest

Contenders = Annotated[
    tuple[str, ...], Field(min_length=1, max_length=64, description="who takes part; all: everybody")
]
Counts = Annotated[
    tuple[Count, ...], Field(min_length=1, max_length=64, description="numbers of partitions, a layer each")
]
Width = Annotated[int, Field(strict=True, ge=1, le=65_536, description="features of a layer")]
Rounds = Annotated[int, Field(strict=True, ge=1, le=10_000, description="rounds; in each, every contender runs once")]
Visit = Annotated[
    float,
    Field(gt=0, le=3600, description="seconds of a contender's timed steps in a round; at least one step"),
    no_boolean,
]
Timeout = Annotated[
    float, Field(gt=0, le=86_400, description="seconds that a contender may take for one answer"), no_boolean
]
Probe = Annotated[float, Field(gt=0, le=3600, description="seconds of each measurement beside the race"), no_boolean]
Tolerance = Annotated[
    float, Field(gt=0, le=1, description="relative difference up to which gradients are equal"), no_boolean
]


class CellsRace(Section):
    """Tiny layers: what a (micro-batch, partition) cell costs the host."""

    partitions: Counts = (1, 2, 4, 8)
    chunks: ChunkCounts = (8, 32, 64)
    checkpoints: Modes = ("always", "except_last", "never")
    width: Width = 4
    rounds: Rounds = 8
    visit_s: Visit = 0.1

    def cases(self, shared: dict[str, Any]) -> Iterator[PeerCase]:
        """A case per n, m and mode; micro-batches of two samples."""
        for mode, n, m in product(self.checkpoints, self.partitions, self.chunks):
            yield _tiny_case("cells", self, (n, m, mode), shared)


class CombinationsRace(Section):
    """Tiny layers once more, in every combination of the engine's components."""

    variants: Variants = ("factorial",)
    partitions: Partitions = 4
    chunks: Chunks = 8
    checkpoints: Modes = ("always", "never")
    width: Width = 4
    rounds: Rounds = 5
    visit_s: Visit = 0.1

    def cases(self, shared: dict[str, Any]) -> Iterator[PeerCase]:
        """A case per mode and combination."""
        for mode, label in product(self.checkpoints, labels_of(self.variants)):
            yield _tiny_case("combinations", self, (self.partitions, self.chunks, mode), {"variant": label, **shared})


def _tiny_case(
    workload: str, race: CellsRace | CombinationsRace, size: tuple[int, int, str], shared: dict[str, Any]
) -> PeerCase:
    """A layer per partition, micro-batches of two samples; ``size``: n, m and mode."""
    n, m, mode = size
    return PeerCase(
        workload=workload, model="tiny", model_args=f"L={n};width={race.width}", partitions=n, chunks=m,
        checkpoint=mode, batch_size=2 * m, balance=(1,) * n, rounds=race.rounds, visit_s=race.visit_s, **shared,
    )  # fmt: skip


class ModelRace(Section):
    """A network that computes; its partitions are balanced by measured time."""

    model: Model = "convnet"
    model_args: ModelArgs = "L=9;C=64;size=32"
    batch_size: BatchSize = 32
    chunks: Chunks = 8
    partitions: Partitions = 2
    checkpoints: Modes = ("always", "never")
    rounds: Rounds = 20
    visit_s: Visit = 0.5

    def problems(self) -> Iterator[Problem]:
        """The race knows the model, and micro-batches are equal."""
        if self.model not in RACED:
            text = f"must be one of {', '.join(RACED)}, got {self.model!r}; {nearest(self.model, RACED)}"
            yield Problem(("model",), text)
            return
        try:
            layers = RACED[self.model].layers(raced_arguments(self.model, self.model_args))
        except ConfigError as error:
            for text in error.problems:
                yield Problem(("model_args", "model"), text)
            return
        if 2 * self.partitions > layers:  # some contenders have two partitions per device
            text = f"must be at most half the {layers} layers of {self.model}, got {self.partitions}; lower it"
            yield Problem(("partitions", "model_args"), text)
        if self.batch_size % self.chunks:
            text = f"must be a multiple of chunks = {self.chunks}, got {self.batch_size}; change either"
            yield Problem(("batch_size", "chunks"), text)

    def cases(self, workload: str, shared: dict[str, Any]) -> Iterator[PeerCase]:
        """A case per mode."""
        names = ("model", "model_args", "batch_size", "chunks", "partitions", "rounds", "visit_s")
        for mode in self.checkpoints:
            own = {name: getattr(self, name) for name in names}
            yield PeerCase(workload=workload, checkpoint=mode, **own, **shared)


class UNetRace(ModelRace):
    """A U-Net, whose skips cross the boundary."""

    model: Model = "unet"
    model_args: ModelArgs = "depth=3;B=5;C=32;size=32;dropout=0"
    visit_s: Visit = 1.0


class DecoderRace(ModelRace):
    """The decoder of a transformer."""

    model: Model = "gpt2"
    model_args: ModelArgs = "L=6;D=96;heads=4;vocabulary=64;context=64;dropout=0"


class PeersSettings(Section):
    """The engine beside other pipelines and the plain module."""

    contenders: Contenders = ("all",)
    seed: Seed = 0
    timeout_s: Timeout = 60.0
    probe_s: Probe = 1.5
    tolerance: Tolerance = 1e-9
    cells: Annotated[CellsRace, Field(description="tiny layers: what a cell costs the host")] = CellsRace()
    combinations: Annotated[
        CombinationsRace, Field(description="tiny layers in every combination of components, beside torchgpipe")
    ] = CombinationsRace()
    convnet: Annotated[ModelRace, Field(description="convolutions in a row: throughput")] = ModelRace()
    unet: Annotated[UNetRace, Field(description="a U-Net, whose skips cross the boundary: throughput")] = UNetRace()
    decoder: Annotated[DecoderRace, Field(description="the decoder of a transformer: throughput")] = DecoderRace()

    def problems(self) -> Iterator[Problem]:
        """Contenders exist."""
        try:
            contenders_of(self.contenders)
        except ConfigError as error:
            for text in error.problems:
                yield Problem(("contenders",), text.removeprefix("contender "))

    def cases(self, machine: Machine) -> list[PeerCase]:
        """All cases on the devices of ``machine``."""
        shared = {"seed": self.seed, "device": machine.device, "devices": machine.count, "cores": cpu_count()}
        networks = (("convnet", self.convnet), ("unet", self.unet), ("decoder", self.decoder))
        return [
            *self.cells.cases(shared),
            *self.combinations.cases(shared),
            *(case for name, network in networks for case in network.cases(name, shared)),
        ]

    def changes(self) -> list[str]:
        """What differs from the defaults, as options of ``peers run``."""
        return _changes(self.model_dump(mode="json"), PeersSettings().model_dump(mode="json"), "")


def _changes(given: dict[str, Any], default: dict[str, Any], prefix: str) -> list[str]:
    words: list[str] = []
    for key, value in given.items():
        if isinstance(value, dict):
            words += _changes(value, default[key], f"{prefix}{key}.")
        elif value != default[key]:
            words += ["--set", f"{prefix}{key}={json.dumps(value)}"]
    return words


_TINY: Final[dict[str, Any]] = {"batch_size": 8, "chunks": 4, "rounds": 3, "visit_s": 0.01}
QUICK: Final = PeersSettings(
    probe_s=0.1,
    cells=CellsRace(partitions=(2,), chunks=(4,), checkpoints=("always",), rounds=3, visit_s=0.01),
    combinations=CombinationsRace(
        variants=("baseline",), partitions=2, chunks=4, checkpoints=("always",), rounds=3, visit_s=0.01
    ),
    convnet=ModelRace(model_args="L=2;C=4;size=8", checkpoints=("never",), **_TINY),
    unet=UNetRace(model_args="depth=2;B=1;C=4;size=16;dropout=0", checkpoints=("always",), **_TINY),
    decoder=DecoderRace(
        model_args="L=1;D=8;heads=2;vocabulary=8;context=4;dropout=0", checkpoints=("always",), **_TINY
    ),
)
"""The whole path in seconds, for a rehearsal: its numbers mean nothing."""

SHORT: Final = PeersSettings(
    contenders=("engine-autograd", "engine-scheduled", "torchgpipe", "plain", "loop"),
    probe_s=0.5,
    cells=CellsRace(partitions=(4,), chunks=(8,), checkpoints=("always", "never")),
    combinations=CombinationsRace(variants=("baseline",), checkpoints=("always",)),
    convnet=ModelRace(checkpoints=("always",), rounds=8, visit_s=0.1),
    unet=UNetRace(checkpoints=("always",), rounds=8, visit_s=0.1),
    decoder=DecoderRace(checkpoints=("always",), rounds=8, visit_s=0.1),
)
"""A minute and a half on one GPU, by the side of other measurements."""
