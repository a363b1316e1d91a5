"""Pipelines with any schedule, and training steps by ``pipe.step``, against the plain module."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpipe_bench import GPipe
from gpipe_bench.schedules import SCHEDULES, named_schedule
from gpipe_bench.schedules.table import TWO_PER_DEVICE
from tests.engine.support import Outcome, trained

DOUBLE = TWO_PER_DEVICE
"""Schedules with several partitions on each device, here two."""
SPLIT = ("zb_h1", "zb_h2", "zb_1p", "zb_2p", "interleaved_zb", "zb_v", "v_half", "v_min")
"""Schedules whose backward passes are cut into I and W."""
ALL = (None, *SCHEDULES)
"""The paper's executor, and every schedule."""
WAYS = [(None, True), (None, False), ("gpipe", True), *((name, False) for name in SCHEDULES)]
"""The executors: a schedule, None for the order of autograd; and whether the pipeline is called, or runs a step."""


def scheduled(module: nn.Sequential, balance: Sequence[int], schedule: Any, **options: Any) -> GPipe:
    """A pipeline with every partition on the CPU."""
    devices = len(balance) // 2 if schedule in DOUBLE else len(balance)
    return GPipe(module, list(balance), devices=["cpu"] * devices, schedule=schedule, **options)


def mean_loss(output: Any, target: Tensor) -> Tensor:
    """The mean over a batch; it treats every element of the output, and every sample, differently."""
    values = output if isinstance(output, tuple) else (output,)
    total = target.sum() * 0
    for value in values:
        if value.is_floating_point():
            weights = torch.linspace(0.5, 1.5, value[:1].numel()).view_as(value[:1]).to(value)
            total = total + ((value.sin() * weights).flatten(1).sum(1) * (1 + target)).sum()
    return total / max(len(target), 1)


def step(
    model: nn.Module,
    x: Any,
    target: Any,
    loss: Callable[[Any, Any], Tensor] = mean_loss,
    *,
    called: bool = False,
    zero: bool = True,
) -> Outcome:
    """A training step, by ``step`` if the model has it and is not to be called."""

    def run(model: nn.Module, x: Any) -> tuple[Tensor, Any]:
        if isinstance(model, GPipe) and not called:
            return model.step(x, target, loss, return_output=True)
        output = model(x)
        total = loss(output, target)
        if total.requires_grad:
            total.backward()
        return total, output

    return trained(model, x, run, zero=zero)


def samples(rows: int, *shape: int, requires_grad: bool = True) -> Tensor:
    """A batch, the same for equal shapes."""
    x = torch.randn(rows, *shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x.requires_grad_(requires_grad)


def targets(rows: int) -> Tensor:
    """A number for each sample."""
    return torch.linspace(-1, 1, rows, dtype=torch.float64)


def backward_orders(schedule: Any, m: int, n: int) -> list[list[int]]:
    """For each partition the micro-batches in the order in which they add to the gradients of its weights."""
    if schedule is None:
        return [[*range(m)][::-1]] * n
    actions = [*named_schedule(schedule, m, n, n // 2 if schedule in DOUBLE else n)]
    return [[i for kind, i, place in actions if kind in "BW" and place == j] for j in range(n)]
