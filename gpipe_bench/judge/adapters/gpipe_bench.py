"""This project's engine in one process: the paper's executor without a schedule, else the runtime, with threads."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gpipe_bench import GPipe, __version__
from gpipe_bench.judge.adapters.plain import PlainPipe
from gpipe_bench.judge.protocol import Loss, Setup
from gpipe_bench.schedules.table import TWO_PER_DEVICE


class GpipeBench:
    """A schedule, or none; ``never`` after a comma is the engine without threads."""

    version, processes = __version__, False

    def __init__(self, text: str) -> None:
        self.schedule, _, self.workers = text.partition(",")
        self.per_device = 2 if self.schedule in TWO_PER_DEVICE else 1
        self.limits = {
            "replicas": "one process; the engine in processes has them",
            "spectral norm/always": "docs/training.md: one power iteration more in a recomputation",
        }

    def build(self, model: nn.Sequential, setup: Setup) -> PlainPipe:
        """The pipeline."""
        options: dict[str, Any] = (
            {} if setup.defaults else {"checkpoint": setup.checkpoint, "deferred_batch_norm": True}
        )
        pipe = GPipe(
            model, setup.balance(len(model)), devices=setup.places, chunks=setup.chunks,
            schedule=self.schedule or None, workers=self.workers or "always", **options,
        )  # fmt: skip
        return _Pipe(model, pipe)


class _Pipe(PlainPipe):
    def step(self, x: Any, target: Any, loss: Loss) -> Tensor:
        pipe: Any = self.pipe
        value: Tensor = pipe.step(x, target, loss.call, reduction=loss.reduction)
        return value.detach()


def adapter(schedule: str = "") -> GpipeBench:
    """The adapter."""
    return GpipeBench(schedule)
