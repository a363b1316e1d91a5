"""All arms of a cell compared step by step: the same weights at the start, the same batches in the same order.

Every arm goes its own way; at each step its gradients are compared with those of the plain and the accumulated arm.
Those two are trained first, then all others, several at once where there are processes for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch

from gpipe_bench.bench.transparency.arms import ACCUMULATED, PLAIN, Arm
from gpipe_bench.bench.transparency.course import Array, Course, Training, train
from gpipe_bench.bench.transparency.data import Images
from gpipe_bench.bench.transparency.settings import TransparencyCell
from gpipe_bench.util.processes import spread

_REFERENCES = (PLAIN, ACCUMULATED)


@dataclass(slots=True)
class Record:
    """What one arm leaves: values for its row, records of its steps and of its normalisation layers."""

    key: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)


def largest_difference(values: Array, reference: Array) -> float:
    """Largest absolute difference of an element, relative to the largest absolute value of the reference."""
    scale, largest = float(np.abs(reference).max()), float(np.abs(values - reference).max())
    return largest / scale if scale else largest


def train_arms(
    cell: TransparencyCell, images: Images, trainings: Sequence[Training], processes: int = 1
) -> list[Record]:
    """Train the plain arm, the accumulated arm and the others of each training.

    Args:
        cell: model, batch, rate and seed.
        images: batches in order, and the held-out images.
        trainings: in which ways.
        processes: how many train at once; see :func:`gpipe_bench.util.processes.spread`.

    Returns:
        A record per arm of each training in turn, the plain and the accumulated one first.
    """

    def course(place: tuple[Training, Arm]) -> Course:
        return train(cell, images, *place)

    def compared(place: tuple[Training, Arm]) -> Record:
        return _record(cell, *place, course(place), references)

    known = [(training, arm) for training in trainings for arm in _REFERENCES]
    references = dict(zip(_keys(known), spread(course, known, processes), strict=True))
    others = [(training, arm) for training in trainings for arm in training.arms]
    found = dict(zip(_keys(others), spread(compared, others, processes), strict=True))
    for place, key in zip(known, _keys(known), strict=True):
        found[key] = _record(cell, *place, references[key], references)
    return [found[id(training), arm] for training in trainings for arm in (*_REFERENCES, *training.arms)]


def _keys(places: Sequence[tuple[Training, Arm]]) -> list[tuple[int, Arm]]:
    return [(id(training), arm) for training, arm in places]


def _record(
    cell: TransparencyCell,
    training: Training,
    arm: Arm,
    course: Course,
    references: dict[tuple[int, Arm], Course],
) -> Record:
    shared = {"evidence": "measured", "model": cell.model, "seed": cell.seed, "precision": training.precision}
    shared["normalisation"] = "frozen" if training.frozen else "batch"
    plain, accumulated = (references[id(training), reference] for reference in _REFERENCES)
    record = Record({**shared, **asdict(arm)})
    for step, (loss, gradients) in enumerate(zip(course.losses, course.gradients, strict=True)):
        differences = {
            "gradient_difference_plain": largest_difference(gradients, plain.gradients[step]),
            "gradient_difference_accumulated": largest_difference(gradients, accumulated.gradients[step]),
        }
        record.steps.append({"step": step, "loss": loss, **differences})
    record.layers = _layer_records(course, plain)
    record.values = _summary(record, accumulated, training.steps) | course.values
    return record


def _layer_records(course: Course, plain: Course) -> list[dict[str, Any]]:
    found = []
    for step, norms in course.norms.items():
        for layer, (norm, base) in enumerate(zip(norms, plain.norms[step], strict=True)):
            pairs = {"mean": (norm.mean, base.mean), "variance": (norm.variance, base.variance)}
            shares = {f"{word}_difference": _relative(a, b) for word, (a, b) in pairs.items()}
            found.append({"step": step, "layer": layer, "name": norm.name, **shares})
    return found


def _relative(values: Array, reference: Array) -> float:
    a, b = torch.from_numpy(values), torch.from_numpy(reference)
    distance, norm = float((a - b).norm()), float(b.norm())
    return distance / norm if norm else distance


def _summary(record: Record, accumulated: Course, steps: int) -> dict[str, Any]:
    plain = [step["gradient_difference_plain"] for step in record.steps]
    losses = [abs(step["loss"] - loss) for step, loss in zip(record.steps, accumulated.losses, strict=True)]
    values: dict[str, Any] = {
        "batch_norms": sum(layer["step"] == 0 for layer in record.layers),
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
    return values
