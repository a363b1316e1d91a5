"""The arms of a case, trained from the same weights on the same batches, and compared step by step.

plain         the whole batch at once
accumulated   micro-batches one after the other, one backward pass: what a pipeline computes, without one
pipeline      GPipe with a checkpoint mode, batch normalisation deferred or not

Every arm goes its own way, several at once where there are processes for them; then the gradients of each step are
compared with those of the plain and the accumulated arm.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

# The base of all batch normalisations, deferred ones too; it has no public name.
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_bench import GPipe
from gpipe_bench.models.table import MODELS, parse_arguments
from gpipe_bench.schedules.cycles import CHECKPOINT_MODES
from gpipe_bench.util.processes import spread
from studies.training.data import Images
from studies.training.settings import Case

_WARMUP: Final = 3

Array = NDArray[np.floating]
"""Instead of a tensor, which would go to another process by way of shared memory."""


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to run the model."""

    arm: str
    checkpoint: str = ""
    deferred_batch_norm: bool | None = None


PLAIN: Final = Arm("plain")
ACCUMULATED: Final = Arm("accumulated")
ARMS: Final = tuple(Arm("pipeline", mode, on) for on in (True, False) for mode in CHECKPOINT_MODES)
_REFERENCES: Final = (PLAIN, ACCUMULATED)


@dataclass(frozen=True, slots=True)
class Training:
    """How some arms are trained.

    Attributes:
        precision: ``float32`` or ``float64``.
        frozen: normalise by the running statistics, which then stay as they are.
        steps: at most those that the images last for.
        arms: beside the plain and the accumulated one, which everything is compared with.
    """

    precision: str
    frozen: bool
    steps: int
    arms: Sequence[Arm]


@dataclass(slots=True)
class Course:
    """What one arm went through.

    Attributes:
        losses: of each step.
        gradients: of each step, all elements of all parameters in a row.
        norms: after the first and the last step, in the order of the model: name, running mean and variance.
        values: columns of a row that nothing is compared for.
    """

    losses: list[float] = field(default_factory=list)
    gradients: list[Array] = field(default_factory=list)
    norms: dict[int, list[tuple[str, Array, Array]]] = field(default_factory=dict)
    values: dict[str, float | None] = field(default_factory=dict)


@dataclass(slots=True)
class Record:
    """What one arm leaves: values for its row, records of its steps and of its normalisation layers."""

    key: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    layers: list[dict[str, Any]] = field(default_factory=list)


def train_arms(case: Case, images: Images, trainings: Sequence[Training], processes: int = 1) -> list[Record]:
    """Train the plain arm, the accumulated arm and the others of each training.

    Args:
        case: model, batch, rate and seed.
        images: batches in order, and the held-out images.
        trainings: in which ways.
        processes: how many train at once; see :func:`gpipe_bench.util.processes.spread`.

    Returns:
        A record per arm of each training in turn, the plain and the accumulated one first.
    """
    found = []
    for training in trainings:
        arms = (*_REFERENCES, *training.arms)
        courses = list(spread(partial(train, case, images, training), arms, processes))
        found += [_record(case, training, arm, course, courses) for arm, course in zip(arms, courses, strict=True)]
    return found


class _Model:
    def __init__(self, case: Case, arm: Arm, training: Training) -> None:
        torch.manual_seed(case.seed)
        self._arm, self._chunks, self._frozen = arm, case.chunks, training.frozen
        self.dtype: torch.dtype = getattr(torch, training.precision)
        self.model = MODELS[case.model].build(**parse_arguments(case.model, case.model_args)).to(self.dtype)
        self.network: nn.Module = self.model
        if arm.arm == "pipeline":
            self.network = GPipe(
                self.model, list(case.balance), devices=["cpu"] * case.partitions, chunks=case.chunks,
                checkpoint=arm.checkpoint, deferred_batch_norm=bool(arm.deferred_batch_norm),
            )  # fmt: skip
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
        if self._arm != ACCUMULATED:
            given: Tensor = self.network(batch)
            return given
        return torch.cat([self.model(part) for part in batch.chunk(self._chunks)])

    def gradients(self, loss: Tensor) -> Array:
        """Run backward; the gradients of all parameters in a row, in the order of the model."""
        self.model.zero_grad()
        torch.autograd.backward(loss)
        found = (torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters())
        return np.concatenate([gradient.numpy().ravel() for gradient in found])

    @torch.no_grad()
    def descend(self, rate: float) -> None:
        """One step of SGD."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad, alpha=-rate)


def train(case: Case, images: Images, training: Training, arm: Arm) -> Course:
    """Train ``arm``, from the weights and on the batches that every arm of the case has."""
    runner, loss_of, course = _Model(case, arm, training), MODELS[case.model].loss, Course()
    for step in range(training.steps):
        part = slice(step * case.batch_size, (step + 1) * case.batch_size)
        batch, target = images.train[part].to(runner.dtype), images.train_target[part]
        target = target.to(runner.dtype) if target.is_floating_point() else target
        loss = loss_of(runner.output(batch), target)
        course.gradients.append(runner.gradients(loss))
        course.losses.append(loss.item())
        runner.descend(_rate(case.learning_rate, step, training.steps))
        if step in {0, training.steps - 1}:
            course.norms[step] = [
                (name, _array(one.running_mean), _array(one.running_var)) for name, one in runner.norms()
            ]
    counted = [int(norm.num_batches_tracked) for _, norm in runner.norms() if norm.num_batches_tracked is not None]
    course.values["updates_per_step"] = max(counted) / training.steps if counted else None
    if training.steps == case.steps and not training.frozen:
        course.values |= _held_out(runner, images)
    return course


def _rate(peak: float, step: int, steps: int) -> float:
    return peak * min(1.0, (step + 1) / _WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2


def _array(values: Tensor | None) -> Array:
    return np.zeros(0) if values is None else values.detach().numpy().copy()


@torch.no_grad()
def _held_out(runner: _Model, images: Images) -> dict[str, float | None]:
    """Accuracy in evaluation, and of the same weights normalised by the held-out batch as a whole."""
    test = images.test.to(runner.dtype)
    runner.network.eval()
    output = runner.network(test)
    other = copy.deepcopy(runner.model).train()(test)
    runner.train()
    values: dict[str, float | None] = {
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


def _record(case: Case, training: Training, arm: Arm, course: Course, courses: Sequence[Course]) -> Record:
    """What an arm leaves, beside the courses of the plain and the accumulated arm of the same training."""
    plain, accumulated = courses[: len(_REFERENCES)]
    head = {"evidence": "measured", "model": case.model, "seed": case.seed, "precision": training.precision}
    record = Record({**head, "normalisation": "frozen" if training.frozen else "batch", **asdict(arm)})
    for step, (loss, gradients) in enumerate(zip(course.losses, course.gradients, strict=True)):
        differences = {
            "gradient_difference_plain": _largest(gradients, plain.gradients[step]),
            "gradient_difference_accumulated": _largest(gradients, accumulated.gradients[step]),
        }
        record.steps.append({"step": step, "loss": loss, **differences})
    for step, norms in course.norms.items():
        for layer, ((name, *own), (_, *base)) in enumerate(zip(norms, plain.norms[step], strict=True)):
            mean, variance = (_relative(*pair) for pair in zip(own, base, strict=True))
            values = {"step": step, "layer": layer, "name": name}
            record.layers.append({**values, "mean_difference": mean, "variance_difference": variance})
    record.values = _summary(record, accumulated, training.steps) | course.values
    return record


def _largest(values: Array, reference: Array) -> float:
    """Largest absolute difference of an element, relative to the largest absolute value of the reference."""
    scale, largest = float(np.abs(reference).max()), float(np.abs(values - reference).max())
    return largest / scale if scale else largest


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
