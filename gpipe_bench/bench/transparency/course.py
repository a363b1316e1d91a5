"""The course of one arm: what it computes at each step, kept to be compared wherever arms were trained."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpipe_bench.bench.transparency.arms import Arm, Runner
from gpipe_bench.bench.transparency.data import Images
from gpipe_bench.bench.transparency.settings import TransparencyCell
from gpipe_bench.models.table import MODELS

_WARMUP = 3

Array = NDArray[np.floating]
"""Instead of a tensor, which would go to another process by way of shared memory."""


@dataclass(frozen=True, slots=True)
class Training:
    """How some arms are trained.

    Attributes:
        precision: ``float32`` or ``float64``.
        frozen: normalise by the running statistics.
        steps: at most those that the images last for.
        arms: beside the plain and the accumulated one, which everything is compared with.
    """

    precision: str
    frozen: bool
    steps: int
    arms: Sequence[Arm]


@dataclass(frozen=True, slots=True)
class Norm:
    """A normalisation after a step: its name, running mean and variance."""

    name: str
    mean: Array
    variance: Array


@dataclass(slots=True)
class Course:
    """What one arm went through.

    Attributes:
        losses: of each step.
        gradients: of each step, all elements of all parameters in a row.
        norms: after the first and the last step, in the order of the model.
        values: columns of a row that nothing is compared for.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Array] = field(default_factory=list)
    norms: dict[int, list[Norm]] = field(default_factory=dict)
    values: dict[str, float | None] = field(default_factory=dict)


def train(cell: TransparencyCell, images: Images, training: Training, arm: Arm) -> Course:
    """Train ``arm``, from the weights and on the batches that every arm of the cell has."""
    dtype: torch.dtype = getattr(torch, training.precision)
    runner = Runner(cell, arm, dtype, frozen=training.frozen)
    loss_of = MODELS[cell.model].loss
    course = Course()
    for step in range(training.steps):
        part = slice(step * cell.batch_size, (step + 1) * cell.batch_size)
        batch, target = images.train[part].to(dtype), images.train_target[part]
        target = target.to(dtype) if target.is_floating_point() else target
        loss = loss_of(runner.output(batch), target)
        course.gradients.append(np.concatenate([gradient.numpy().ravel() for gradient in runner.gradients(loss)]))
        course.losses.append(loss.item())
        runner.descend(_rate(cell.learning_rate, step, training.steps))
        if step in {0, training.steps - 1}:
            course.norms[step] = _norms(runner)
    counted = [int(norm.num_batches_tracked) for _, norm in runner.norms() if norm.num_batches_tracked is not None]
    course.values["updates_per_step"] = max(counted) / training.steps if counted else None
    if training.steps == cell.steps and not training.frozen:
        course.values |= _held_out(runner, images, dtype)
    return course


def _rate(peak: float, step: int, steps: int) -> float:
    return peak * min(1.0, (step + 1) / _WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2


def _norms(runner: Runner) -> list[Norm]:
    return [Norm(name, _kept(norm.running_mean), _kept(norm.running_var)) for name, norm in runner.norms()]


def _kept(values: Tensor | None) -> Array:
    return np.zeros(0) if values is None else values.detach().numpy().copy()


@torch.no_grad()
def _held_out(runner: Runner, images: Images, dtype: torch.dtype) -> dict[str, float]:
    """Accuracy in evaluation, and of the same weights normalised by the held-out batch as a whole."""
    runner.network.eval()
    output = runner.network(images.test.to(dtype))
    other = copy.deepcopy(runner.model).train()(images.test.to(dtype))
    runner.train()
    values = {
        "accuracy_fraction": _accuracy(output, images.test_target),
        "accuracy_batch_fraction": _accuracy(other, images.test_target),
    }
    if images.test_target.is_floating_point():
        guess, truth = output > 0, images.test_target > 0
        values["iou_fraction"] = float((guess & truth).sum() / (guess | truth).sum().clamp(min=1))
    return values


def _accuracy(output: Tensor, target: Tensor) -> float:
    right = (output > 0) == (target > 0) if target.is_floating_point() else output.argmax(1) == target
    return float(right.double().mean())
