"""This project's engine with a process per device, over gloo."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from gpipe_bench import __version__
from gpipe_bench.distributed import Pipe
from gpipe_bench.judge.pipes import StepPipe, mesh_of, options_of
from gpipe_bench.judge.protocol import Setup
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

    def build(self, model: nn.Sequential, setup: Setup) -> StepPipe:
        """The part of this rank."""
        options: dict[str, Any] = options_of(setup)
        if setup.copies > 1:
            mesh = mesh_of(setup.copies, setup.n)
            options |= {"mesh": mesh["pp"]} | ({"replicas": mesh["copies"]} if setup.replicas > 1 else {})
        options |= {"chunks": setup.chunks, "device": setup.places[dist.get_rank() % setup.n]}
        return _Pipe(model, Pipe(model, setup.balance(len(model)), schedule=self.schedule, **options))


class _Pipe(StepPipe):
    def clip(self, max_norm: float) -> Tensor:
        pipe: Any = self.pipe
        norm: Tensor = pipe.clip_grad_norm_(max_norm)
        return norm


def adapter(schedule: str = "") -> Processes:
    """The adapter."""
    return Processes(schedule)
