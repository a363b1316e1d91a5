"""This project's engine in one process: the paper's executor without a schedule, else the runtime, with threads."""

from __future__ import annotations

from torch import nn

from gpipe_bench import GPipe, __version__
from gpipe_bench.judge.pipes import StepPipe, options_of
from gpipe_bench.judge.protocol import Setup
from gpipe_bench.schedules.table import TWO_PER_DEVICE


class GpipeBench:
    """A schedule, or none; ``never`` after a comma is the engine without threads."""

    version, processes = __version__, False

    def __init__(self, text: str) -> None:
        self.schedule, _, self.workers = text.partition(",")
        self.per_device = 2 if self.schedule in TWO_PER_DEVICE else 1
        self.limits = {
            "replicas": "one process; the engine in processes has them",
            "shards": "one process; the engine in processes has them",
            "spectral norm/always": "docs/training.md: one power iteration more in a recomputation",
        }

    def build(self, model: nn.Sequential, setup: Setup) -> StepPipe:
        """The pipeline."""
        pipe = GPipe(
            model, setup.balance(len(model)), devices=setup.places, chunks=setup.chunks,
            schedule=self.schedule or None, workers=self.workers or "always", **options_of(setup),
        )  # fmt: skip
        return StepPipe(model, pipe)


def adapter(schedule: str = "") -> GpipeBench:
    """The adapter."""
    return GpipeBench(schedule)
