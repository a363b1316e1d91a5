"""The arms of the comparison: one model from the same weights, run in different ways.

plain         the whole batch at once
accumulated   micro-batches one after the other, one backward pass: what a pipeline computes, without one
pipeline      GPipe with a checkpoint mode, batch normalisation deferred or not
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# The base of all batch normalisations, deferred ones too; it has no public name.
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_bench.bench.transparency.settings import TransparencyCell
from gpipe_bench.engine.gpipe import GPipe
from gpipe_bench.models.table import MODELS, parse_arguments
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run the model."""

    arm: str
    checkpoint: str = ""
    deferred_batch_norm: bool | None = None


PLAIN = Arm("plain")
ACCUMULATED = Arm("accumulated")
ARMS = tuple(Arm("pipeline", mode, on) for on in (True, False) for mode in CHECKPOINT_MODES)


class Runner:
    """The model of a cell in one arm, in training.

    Args:
        cell: model, batch and seed; every arm of it starts from the same weights.
        arm: how it is run.
        dtype: of parameters and activations.
        frozen: normalise by the running statistics, which then stay as they are.
    """

    def __init__(self, cell: TransparencyCell, arm: Arm, dtype: torch.dtype, *, frozen: bool) -> None:
        torch.manual_seed(cell.seed)
        self.arm, self._chunks, self._frozen = arm, cell.chunks, frozen
        self.model = MODELS[cell.model].build(**parse_arguments(cell.model, cell.model_args)).to(dtype)
        self.network: nn.Module = self.model
        if arm.arm == "pipeline":
            self.network = GPipe(
                self.model,
                balance=list(cell.balance),
                devices=["cpu"] * cell.partitions,
                chunks=cell.chunks,
                checkpoint=arm.checkpoint,
                deferred_batch_norm=bool(arm.deferred_batch_norm),
            )
        self.train()

    def train(self) -> None:
        """Back to training, norms frozen if they were."""
        self.network.train()
        for _, norm in self.norms():
            norm.train(not self._frozen)

    def norms(self) -> Iterator[tuple[str, _BatchNorm]]:
        """Name and layer of every normalisation with running statistics, in the order of the model."""
        for name, module in self.model.named_modules():
            if isinstance(module, _BatchNorm) and module.running_var is not None:
                yield name, module

    def output(self, batch: Tensor) -> Tensor:
        """What the model gives for (N, ...), in the way of the arm."""
        if self.arm.arm != "accumulated":
            return self._tensor(self.network(batch))
        return torch.cat([self._tensor(self.model(part)) for part in batch.chunk(self._chunks)])

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """Run backward; the gradient of every parameter, in the order of the model."""
        self.model.zero_grad()
        torch.autograd.backward(loss)
        return [p.grad if p.grad is not None else torch.zeros_like(p) for p in self.model.parameters()]

    @torch.no_grad()
    def descend(self, rate: float) -> None:
        """One step of SGD."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-rate)

    @staticmethod
    def _tensor(value: Any) -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"output must be a tensor, got {type(value).__name__}; choose a model that gives one")
        return value
