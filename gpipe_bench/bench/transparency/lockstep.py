"""All arms of a cell trained side by side: the same weights at the start, the same batches in the same order.

Every arm goes its own way; at each step its gradients are compared with those of the plain and the accumulated arm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from gpipe_bench.bench.transparency.arms import ACCUMULATED, PLAIN, Arm, Runner
from gpipe_bench.bench.transparency.data import Images
from gpipe_bench.bench.transparency.settings import TransparencyCell
from models.table import MODELS

__all__ = ["Record", "largest_difference", "train_arms"]

_WARMUP = 3


@dataclass(slots=True)
class Record:
    """What one arm leaves: values for its row, records of its steps and of its normalisation layers."""

    key: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)


def largest_difference(values: Sequence[Tensor], reference: Sequence[Tensor]) -> float:
    """Largest absolute difference over all elements, relative to the largest absolute value of the reference."""
    scale = max(float(b.abs().max()) for b in reference)
    largest = max(float((a - b).abs().max()) for a, b in zip(values, reference, strict=True))
    return largest / scale if scale else largest


def train_arms(
    cell: TransparencyCell, images: Images, arms: Sequence[Arm], *, precision: str, frozen: bool, steps: int
) -> list[Record]:
    """Train ``arms``, PLAIN and ACCUMULATED among them, for ``steps`` steps.

    Args:
        cell: model, batch, rate and seed.
        images: batches in order, and the held-out images.
        arms: the ways to run it.
        precision: ``float32`` or ``float64``.
        frozen: normalise by the running statistics.
        steps: at most those that the images last for.
    """
    dtype: torch.dtype = getattr(torch, precision)
    runners = {arm: Runner(cell, arm, dtype, frozen=frozen) for arm in arms}
    shared = {"evidence": "measured", "model": cell.model, "seed": cell.seed, "precision": precision}
    shared["normalisation"] = "frozen" if frozen else "batch"
    records = {arm: Record({**shared, **asdict(arm)}) for arm in arms}
    loss_of = MODELS[cell.model].loss
    for step in range(steps):
        part = slice(step * cell.batch_size, (step + 1) * cell.batch_size)
        batch, target = images.train[part].to(dtype), images.train_target[part]
        target = target.to(dtype) if target.is_floating_point() else target
        losses = {arm: loss_of(runner.output(batch), target) for arm, runner in runners.items()}
        gradients = {arm: runner.gradients(losses[arm]) for arm, runner in runners.items()}
        for arm, record in records.items():
            record.steps.append({"step": step, "loss": losses[arm].item(), **_differences(gradients, arm)})
            runners[arm].descend(_rate(cell.learning_rate, step, steps))
            if step in {0, steps - 1}:
                record.layers += _layer_records(runners[arm], runners[PLAIN], step)
    for arm, record in records.items():
        record.values = _summary(record, records[ACCUMULATED], runners[arm], steps)
        if steps == cell.steps and not frozen:
            record.values |= _held_out(runners[arm], images, dtype)
    return list(records.values())


def _differences(gradients: dict[Arm, list[Tensor]], arm: Arm) -> dict[str, float]:
    return {
        "gradient_difference_plain": largest_difference(gradients[arm], gradients[PLAIN]),
        "gradient_difference_accumulated": largest_difference(gradients[arm], gradients[ACCUMULATED]),
    }


def _rate(peak: float, step: int, steps: int) -> float:
    return peak * min(1.0, (step + 1) / _WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2


def _layer_records(runner: Runner, plain: Runner, step: int) -> list[dict[str, Any]]:
    found = []
    for layer, ((name, norm), (_, base)) in enumerate(zip(runner.norms(), plain.norms(), strict=True)):
        pairs = {"mean": (norm.running_mean, base.running_mean), "variance": (norm.running_var, base.running_var)}
        shares = {f"{word}_difference": _relative(a, b) for word, (a, b) in pairs.items()}
        found.append({"step": step, "layer": layer, "name": name, **shares})
    return found


def _relative(values: Tensor | None, reference: Tensor | None) -> float:
    if values is None or reference is None:
        return 0.0
    distance, norm = float((values - reference).norm()), float(reference.norm())
    return distance / norm if norm else distance


def _summary(record: Record, accumulated: Record, runner: Runner, steps: int) -> dict[str, Any]:
    plain = [step["gradient_difference_plain"] for step in record.steps]
    losses = [abs(a["loss"] - b["loss"]) for a, b in zip(record.steps, accumulated.steps, strict=True)]
    values: dict[str, Any] = {
        "loss_last": record.steps[-1]["loss"],
        "gradient_difference_plain_first": plain[0],
        "gradient_difference_plain_largest": max(plain),
        "gradient_difference_accumulated_largest": max(s["gradient_difference_accumulated"] for s in record.steps),
        "loss_difference_accumulated_largest": max(losses),
    }
    for word, step in (("first", 0), ("last", steps - 1)):
        found = [layer["variance_difference"] for layer in record.layers if layer["step"] == step]
        values[f"statistics_difference_{word}"] = sorted(found)[len(found) // 2] if found else None
        if step == 0:
            values["statistics_difference_entry"] = found[0] if found else None
    counted = [int(norm.num_batches_tracked) for _, norm in runner.norms() if norm.num_batches_tracked is not None]
    values["updates_per_step"] = max(counted) / steps if counted else None
    return values


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
