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

from gpipe_bench.emulator.shapes import keep_gradients
from gpipe_bench.engine.gpipe import GPipe
from gpipe_bench.engine.tied import find_ties
from gpipe_bench.errors import BalanceError, ConfigError
from gpipe_bench.kernels.optimizers import make_optimizer
from gpipe_bench.kernels.specs import meta_twin
from gpipe_bench.models.table import check_arguments, format_arguments, model_spec
from gpipe_bench.step.request import Model, Request


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


def work_of(request: Request) -> Work:
    """What :func:`gpipe_bench.emulator.emulate` was asked to train.

    Raises:
        ConfigError: there is no such model, its arguments are wrong, or a module comes without a tensor.
    """
    model, batch_size, sample, target = request.model, request.batch_size, request.sample, request.target
    if not isinstance(model, Model):
        if not isinstance(sample, Tensor):
            raise ConfigError(["sample must be given with a module, got None; pass a tensor of shape (samples, ...)"])
        inputs = torch.empty(batch_size, *sample.shape[1:], dtype=sample.dtype, device="meta")
        goal = None if target is None else target.to("meta")
        assert isinstance(model, nn.Sequential)  # noqa: S101 - as checked
        twin = meta_twin(model)
        assert isinstance(twin, nn.Sequential)  # noqa: S101 - a copy is of the same type
        return Work(twin, inputs, goal, request.loss, {"model": type(model).__name__})
    spec, arguments = model_spec(model.name), check_arguments(model.name, model.arguments)
    with torch.device("meta"):
        module = spec.build(**arguments)
    inputs, goal = spec.make_batch(batch_size, arguments, device="meta")
    facts = {"model": model.name, "model_args": format_arguments(arguments)}
    return Work(module, inputs, goal, spec.loss, facts)


class Training:
    """A pipeline with its batch on virtual devices, ready to train.

    Args:
        work: model and batch; the layers move to the devices.
        request: in which pipeline.
        devices: device of each device of the schedule.

    Raises:
        BalanceError: the sum of the balance is not the number of layers.
    """

    def __init__(self, work: Work, request: Request, devices: Sequence[torch.device]) -> None:
        layers, ties = iter(work.module), find_ties([*work.module])
        if sum(request.balance) != len(work.module):
            total = sum(request.balance)
            rule = f"balance must sum to the {len(work.module)} layers of the model"
            raise BalanceError(f"{rule}, got {total}; change it")
        for rank, count in zip(request.placement, request.balance, strict=True):
            for layer in islice(layers, count):
                layer.to_empty(device=devices[rank])
        for tie in ties:
            tie.fasten()
        self.pipe = GPipe(
            work.module,
            balance=list(request.balance),
            devices=list(devices),
            chunks=request.chunks,
            checkpoint=request.checkpoint,
            components=request.components,
            schedule=request.order,
            transfer=request.transfer,
        )
        keep_gradients(self.pipe.parameters())
        first, last = self.pipe.devices[0], self.pipe.devices[-1]
        self._inputs = torch.empty_like(work.inputs, device=first)
        self._target = None if work.target is None else torch.empty_like(work.target, device=last)
        self._loss = work.loss
        self._whole = request.schedule is None
        self._optimizer = make_optimizer(request.optimizer, self.pipe.parameters()) if request.optimizer else None

    def step(self) -> None:
        """Train on the batch once."""
        self.pipe.zero_grad()
        if self._whole:
            # Nothing else holds the output: it may go before the backward pass.
            torch.autograd.backward(self._scalar(self.pipe(self._inputs), self._target))
        else:
            self.pipe.step(self._inputs, self._target, self._scalar, reduction="mean")
        if self._optimizer is not None:
            self._optimizer.step()

    def _scalar(self, output: Any, target: Any) -> Tensor:
        scalar: Tensor = output.sum() if self._loss is None else self._loss(output, target)
        return scalar
