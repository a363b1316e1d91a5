"""The reference: the engine of one file, which planted faults change."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from gpipe_bench import __version__
from gpipe_bench.judge.pipes import PlainPipe
from gpipe_bench.judge.protocol import Loss, Setup
from gpipe_bench.judge.reference import Pipeline
from gpipe_bench.schedules.table import TWO_PER_DEVICE


class Reference:
    """A schedule, and the class of the engine: the right one, or one with a planted fault."""

    version, processes = __version__, False

    def __init__(self, schedule: str = "1f1b", kind: type[Pipeline] = Pipeline) -> None:
        self.schedule, self.kind = schedule, kind
        self.per_device = 2 if schedule in TWO_PER_DEVICE else 1
        self.limits = {"replicas": "one process", "shards": "one process"}

    def build(self, model: nn.Sequential, setup: Setup) -> PlainPipe:
        """The pipeline."""
        options: dict[str, Any] = {"chunks": setup.chunks, "checkpoint": setup.checkpoint, "schedule": self.schedule}
        return _Pipe(model, self.kind(model, setup.balance(len(model)), **options))


class _Pipe(PlainPipe):
    def __init__(self, model: nn.Module, pipe: Pipeline) -> None:
        super().__init__(model, model)
        self.engine = pipe

    def step(self, x: Any, target: Any, loss: Loss) -> Tensor:
        return self.engine.step(x, target, loss.call, loss.reduction)

    def evaluate(self, x: Any) -> Any:
        return self.engine.evaluate(x)

    def clip(self, max_norm: float) -> Tensor:
        return self.engine.clip(max_norm)


def adapter(schedule: str = "") -> Reference:
    """The adapter."""
    return Reference(schedule or "1f1b")
