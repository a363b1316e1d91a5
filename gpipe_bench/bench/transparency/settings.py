"""Settings of the transparency experiment. Imports neither PyTorch nor scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from gpipe_bench.bench.spec.names import model_word
from gpipe_bench.bench.spec.problems import Problem
from gpipe_bench.bench.spec.settings import (
    Balance,
    BatchSize,
    Chunks,
    Model,
    ModelArgs,
    Partitions,
    Section,
    Seed,
    Threads,
    cut_problems,
    no_boolean,
)
from gpipe_bench.errors import ConfigError
from gpipe_bench.models.table import model_digest, model_spec

Steps = Annotated[
    int, Field(strict=True, ge=1, le=10**6, description="training steps of each run, at most one pass over the images")
]
ExactSteps = Annotated[int, Field(strict=True, ge=1, le=10**6, description="steps of the runs in float64")]
Rate = Annotated[
    float,
    Field(gt=0, le=1000, description="peak learning rate of SGD; warm-up of 3 steps, then cosine to 0"),
    no_boolean,
]
HeldOut = Annotated[int, Field(strict=True, ge=1, le=1000, description="held-out images, at most 1000 of the 1797")]
Seeds = Annotated[int, Field(strict=True, ge=2, le=1000, description="seeds 0, 1, ...: split, order, weights, noise")]
Margin = Annotated[
    float, Field(gt=0, lt=1, description="accuracies that differ by less count as equivalent"), no_boolean
]
LossMargin = Annotated[
    float, Field(gt=0, le=1000, description="training losses that differ by less count as equivalent"), no_boolean
]


class _Training(Section):
    model: Model = "amoebanet-d"
    model_args: ModelArgs = "L=3;D=8;size=64;classes=10"
    batch_size: BatchSize = 32
    chunks: Chunks = 4
    partitions: Partitions = 2
    balance: Balance = (5, 4)
    steps: Steps = 36
    exact_steps: ExactSteps = 1
    learning_rate: Rate = 0.5
    held_out: HeldOut = 256
    threads: Threads = 1

    def problems(self) -> Iterator[Problem]:
        """Rules of every pipeline, and images enough."""
        yield from cut_problems(self, self.partitions, self.balance)
        if not _takes_images(self.model):
            rule = f"must be a model of the suite for images, got {self.model!r}"
            yield Problem(("model",), f"{rule}; use one with an argument size, such as vit")
        most = (1797 - self.held_out) // self.batch_size
        for name in ("steps", "exact_steps"):
            if (got := getattr(self, name)) > most:
                text = f"must be at most {most} for {self.held_out} held-out images, got {got}; lower it"
                yield Problem((name, "batch_size", "held_out"), text)


def _takes_images(model: str) -> bool:
    """Whether digits can be drawn for a model; of one that is not known other rules say what is wrong."""
    try:
        return "size" in model_spec(model).arguments and not model_digest(model)
    except ConfigError:
        return True


class TransparencyCell(_Training):
    """One model and seed; all its arms train side by side in one process, so that every step can be compared."""

    seed: Seed = 0

    @property
    def id(self) -> str:
        """Readable name, unique by its digest."""
        return f"transparency-{model_word(self.model)}-s{self.seed}-{self.config_sha256[:8]}"


class TransparencyWorkload(_Training):
    """One model over seeds."""

    seeds: Seeds = 5

    def cells(self) -> list[TransparencyCell]:
        """A cell per seed."""
        common: dict[str, Any] = {name: getattr(self, name) for name in _Training.model_fields}
        return [TransparencyCell(**common, seed=seed) for seed in range(self.seeds)]


class UNetWorkload(TransparencyWorkload):
    """Segments digits drawn over photographs."""

    model: Model = "unet"
    model_args: ModelArgs = "depth=2;B=1;C=8;size=32;in=3;out=1;dropout=0"
    batch_size: BatchSize = 16
    balance: Balance = (12, 17)
    steps: Steps = 40
    learning_rate: Rate = 0.3
    held_out: HeldOut = 128


class TransparencySettings(Section):
    """Training on real images with and without the pipeline."""

    margin: Margin = 0.05
    loss_margin: LossMargin = 0.05
    amoebanet: Annotated[TransparencyWorkload, Field(description="classifies handwritten digits")] = (
        TransparencyWorkload()
    )
    unet: Annotated[UNetWorkload, Field(description="segments digits drawn over photographs")] = UNetWorkload()

    def cells(self) -> list[TransparencyCell]:
        """The cells of both models."""
        return [*self.amoebanet.cells(), *self.unet.cells()]

    def training(self) -> dict[str, tuple[list[str], int]]:
        """For each workload the options of ``transparency run`` that differ from its defaults, and how many seeds."""
        found: dict[str, tuple[list[str], int]] = {}
        for name, workload in (("amoebanet", self.amoebanet), ("unet", self.unet)):
            default, given = type(workload)().model_dump(mode="json"), workload.model_dump(mode="json")
            changed = {key: value for key, value in given.items() if value != default[key] and key != "seeds"}
            words = [word for key, value in changed.items() for word in ("--set", f"{name}.{key}={value}")]
            found[name] = words, workload.seeds
        return found
