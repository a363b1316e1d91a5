"""The module itself, on the whole batch: what every engine is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.judge.protocol import Loss, Setup


class Plain:
    """No pipeline."""

    version: str = torch.__version__
    processes, per_device = False, 1
    limits: Mapping[str, str] = {
        "passes": "not a pipeline",
        "replicas": "not a pipeline",
        "error in forward": "one call, so no third",
    }

    def build(self, model: nn.Sequential, setup: Setup) -> PlainPipe:  # noqa: ARG002 - the interface of adapters
        """The module."""
        return PlainPipe(model, model)


class PlainPipe:
    """A module that is called and then run backward: what pipes in one process share."""

    def __init__(self, model: nn.Module, pipe: nn.Module) -> None:
        self.model, self.pipe = model, pipe

    def own(self) -> list[nn.Module]:
        """All of it."""
        return [self.pipe]

    def step(self, x: Any, target: Any, loss: Loss) -> Tensor:
        """Forward, backward."""
        value = loss.call(self.pipe(x), target)
        torch.autograd.backward(value)
        return value.detach()

    def evaluate(self, x: Any) -> Any:
        """Forward."""
        with torch.no_grad():
            return self.pipe(x)

    def clip(self, max_norm: float) -> Tensor:
        """By PyTorch's function."""
        return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)


def adapter(schedule: str = "") -> Plain:  # noqa: ARG001 - the interface of adapters
    """The adapter."""
    return Plain()
