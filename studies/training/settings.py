"""Settings of the study. Imports neither PyTorch nor scikit-learn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import Field

from gpipe_bench.settings import BatchSize, Chunks, Partitions, Seed, Threads, whole
from gpipe_bench.suite.cells import cut_problems as cut
from gpipe_bench.suite.settings import Balance, Model, ModelArgs, Problem, Section
from gpipe_bench.suite.validation import validated

MODELS = ("amoebanet-d", "unet")
"""What is trained."""

IMAGES = 1797
"""Digits that scikit-learn ships."""

Steps = Annotated[int, whole("training steps of each run, at most one pass over the images", most=10**6)]
ExactSteps = Annotated[int, whole("steps of the runs in float64", most=10**6)]
Rate = Annotated[
    float, Field(gt=0, le=1000, description="peak learning rate of SGD; warm-up of 3 steps, then cosine to 0")
]
HeldOut = Annotated[int, whole("held-out images, at most 1000 of the 1797", most=1000)]
Seeds = Annotated[int, whole("seeds 0, 1, ...: split, order, weights, noise", 2, 1000)]
Margin = Annotated[float, Field(gt=0, lt=1, description="accuracies that differ by less count as equivalent")]
LossMargin = Annotated[
    float, Field(gt=0, le=1000, description="training losses that differ by less count as equivalent")
]


class Case(Section):
    """One model and seed; all its arms start from the same weights and see the same batches."""

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
    seed: Seed = 0

    def problems(self) -> Iterator[Problem]:
        """Rules of every pipeline, and images enough."""
        yield from cut(self, self.partitions, self.balance)
        most = (IMAGES - self.held_out) // self.batch_size
        for name in ("steps", "exact_steps"):
            if (got := getattr(self, name)) > most:
                text = f"must be at most {most} for {self.held_out} held-out images, got {got}; lower it"
                yield Problem((name, "batch_size", "held_out"), text)


class Workload(Case):
    """One model over seeds."""

    seeds: Seeds = 5

    def cases(self) -> list[Case]:
        """A case per seed."""
        given = self.model_dump(exclude={"seeds", "seed"})
        return [Case(**given, seed=seed) for seed in range(self.seeds)]


class UNetWorkload(Workload):
    """Segments digits drawn over photographs."""

    model: Model = "unet"
    model_args: ModelArgs = "depth=2;B=1;C=8;size=32;in=3;out=1;dropout=0"
    batch_size: BatchSize = 16
    balance: Balance = (12, 17)
    steps: Steps = 40
    learning_rate: Rate = 0.3
    held_out: HeldOut = 128


class Settings(Section):
    """Training on real images with and without the pipeline."""

    margin: Margin = 0.05
    loss_margin: LossMargin = 0.05
    amoebanet: Annotated[Workload, Field(description="classifies handwritten digits")] = Workload()
    unet: Annotated[UNetWorkload, Field(description="segments digits drawn over photographs")] = UNetWorkload()


def read_settings(data: Mapping[str, Any]) -> Settings:
    """The settings in plain data; what is left out has its default.

    Raises:
        ConfigError: settings are wrong; carries all problems.
    """
    return validated(Settings, data, lambda path: f"transparency: {'.'.join(path)}")
