"""The emulated training: a pipeline of the engine on virtual devices, its batch, and the repeated step.

Model and batch never have values: they are made on the meta device, and their memory on the virtual devices is none of
the host's. Loss and optimizer are those that the simulator counts. As in measured cells, a step begins without
gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench.components import Components
from gpipe_bench.engine.gpipe import GPipe
from gpipe_bench.errors import BalanceError, ConfigError
from gpipe_bench.models.table import check_arguments, format_arguments, model_spec
from gpipe_bench.schedules import Schedule
from gpipe_bench.simulator.tracing.specs import meta_twin
from gpipe_bench.simulator.workloads.build import Model
from gpipe_bench.simulator.workloads.optimizer_trace import make_optimizer


@dataclass(frozen=True, slots=True)
class Work:
    """A model with its batch, target and loss; all of it on the meta device.

    Attributes:
        module: the layers.
        inputs: a whole batch.
        target: of the batch; None without a loss.
        loss: (output, target) -> scalar; None: gradients of ones.
        facts: columns of a row that name the model.
    """

    module: nn.Sequential
    inputs: Tensor
    target: Tensor | None
    loss: Callable[..., Tensor] | None
    facts: dict[str, str]


def work_of(
    model: nn.Sequential | Model,
    batch_size: int,
    sample: Tensor | None = None,
    loss: Callable[..., Tensor] | None = None,
    target: Tensor | None = None,
) -> Work:
    """What :func:`gpipe_bench.emulator.emulate.emulate` was asked to train.

    Raises:
        ConfigError: there is no such model, its arguments are wrong, or a module comes without a tensor.
    """
    if not isinstance(model, Model):
        if sample is None:
            raise ConfigError(["sample must be given with a module, got None; pass a tensor of shape (samples, ...)"])
        inputs = torch.empty(batch_size, *sample.shape[1:], dtype=sample.dtype, device="meta")
        goal = None if target is None else target.to("meta")
        twin = meta_twin(model)
        assert isinstance(twin, nn.Sequential)  # noqa: S101 - a copy is of the same type
        return Work(twin, inputs, goal, loss, {"model": type(model).__name__})
    spec, arguments = model_spec(model.name), check_arguments(model.name, model.arguments)
    with torch.device("meta"):
        module = spec.build(**arguments)
    inputs, goal = spec.make_batch(batch_size, arguments, device="meta")
    facts = {"model": model.name, "model_args": format_arguments(arguments)}
    return Work(module, inputs, goal, spec.loss, facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The pipeline: arguments of the engine, and the optimizer.

    Attributes:
        balance: layers per partition.
        places: device of each device of the schedule.
        homes: for each partition its place in ``places``.
        chunks: micro-batches.
        checkpoint: ``always``, ``except_last`` or ``never``.
        components: of the engine.
        schedule: it or its name; None: the paper's executor.
        transfer: ``direct`` or ``host``.
        optimizer: ``sgd``, ``momentum``, ``rmsprop``, ``adam`` or ``adamw``; None for no update.
    """

    balance: Sequence[int]
    places: Sequence[torch.device]
    homes: Sequence[int]
    chunks: int
    checkpoint: str
    components: Components
    schedule: str | Schedule | None
    transfer: str
    optimizer: str | None


class Training:
    """A pipeline with its batch on virtual devices, ready to train.

    Args:
        work: model and batch; the layers move to the devices.
        plan: in which pipeline.

    Raises:
        BalanceError: the sum of the balance is not the number of layers.
    """

    def __init__(self, work: Work, plan: Plan) -> None:
        layers = iter(work.module)
        if sum(plan.balance) != len(work.module):
            raise BalanceError(
                f"balance must sum to the {len(work.module)} layers of the model, got {sum(plan.balance)}; change it"
            )
        for home, count in zip(plan.homes, plan.balance, strict=True):
            for layer in islice(layers, count):
                layer.to_empty(device=plan.places[home])
        self.pipe = GPipe(
            work.module,
            balance=list(plan.balance),
            devices=list(plan.places),
            chunks=plan.chunks,
            checkpoint=plan.checkpoint,
            components=plan.components,
            schedule=plan.schedule,
            transfer=plan.transfer,
        )
        first, last = self.pipe.devices[0], self.pipe.devices[-1]
        self._inputs = torch.empty_like(work.inputs, device=first)
        self._target = None if work.target is None else torch.empty_like(work.target, device=last)
        self._loss = work.loss
        self._whole = plan.schedule is None
        self._optimizer = make_optimizer(plan.optimizer, self.pipe.parameters()) if plan.optimizer else None

    def step(self) -> None:
        """Train on the batch once."""
        self.pipe.zero_grad()
        if self._whole:
            self._backward(self.pipe(self._inputs))
        else:
            self.pipe.step(self._inputs, self._target, self._scalar, reduction="mean")
        if self._optimizer is not None:
            self._optimizer.step()

    def _backward(self, output: Any) -> None:
        torch.autograd.backward(self._scalar(output, self._target))

    def _scalar(self, output: Any, target: Any) -> Tensor:
        scalar: Tensor = output.sum() if self._loss is None else self._loss(output, target)
        return scalar
