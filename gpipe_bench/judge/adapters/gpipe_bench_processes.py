"""This project's engine with a process per device, over gloo."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gpipe_bench import __version__
from gpipe_bench.distributed import Pipe
from gpipe_bench.judge.protocol import Loss, Setup
from gpipe_bench.schedules.table import TWO_PER_DEVICE


class Processes:
    """A schedule."""

    version, processes = __version__, True
    limits = {  # noqa: RUF012 - a constant
        "recovery": "docs/distributed.md: after an error the pipeline can run no more",
        "spectral norm/always": "docs/training.md: one power iteration more in a recomputation",
    }

    def __init__(self, schedule: str) -> None:
        self.schedule, self.per_device = schedule or "1f1b", 2 if schedule in TWO_PER_DEVICE else 1

    def build(self, model: nn.Sequential, setup: Setup) -> _Pipe:
        """The part of this rank."""
        options: dict[str, Any] = (
            {} if setup.defaults else {"checkpoint": setup.checkpoint, "deferred_batch_norm": True}
        )
        if setup.replicas > 1:
            mesh = dist.device_mesh.init_device_mesh("cpu", (setup.replicas, setup.n), mesh_dim_names=("dp", "pp"))
            options |= {"mesh": mesh["pp"], "replicas": mesh["dp"]}
        options |= {"chunks": setup.chunks, "device": setup.places[dist.get_rank() % setup.n]}
        return _Pipe(Pipe(model, setup.balance(len(model)), schedule=self.schedule, **options))


class _Pipe:
    def __init__(self, pipe: Pipe) -> None:
        self.pipe = pipe

    def own(self) -> list[nn.Module]:
        return [self.pipe]

    def step(self, x: Any, target: Any, loss: Loss) -> Tensor:
        value: Tensor = self.pipe.step(x, target, loss.call, reduction=loss.reduction)
        return value.detach()

    def evaluate(self, x: Any) -> Any:
        with torch.no_grad():
            return self.pipe(x)

    def clip(self, max_norm: float) -> Tensor:
        return self.pipe.clip_grad_norm_(max_norm)


def adapter(schedule: str = "") -> Processes:
    """The adapter."""
    return Processes(schedule)
