"""Data parallelism beside a pipeline: replicas of a pipeline train on parts of a batch, and average their gradients."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


def average_gradients(module: nn.Module, group: Any) -> None:
    """Average the gradients of a module over the processes of ``group``; call it once per step, after ``pipe.step``.

    Args:
        module: the same one in all processes of the group, such as the part of a distributed pipeline that one process
            has. A parameter without a gradient counts as one with zeros.
        group: a ``ProcessGroup``, such as ``mesh["data"].get_group()`` of a two-dimensional ``DeviceMesh``.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    # One message for each type: an all-reduce of many small tensors takes longer.
    for parameters in _by_type(trained):
        grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= dist.get_world_size(group)
        for grad, part in zip(grads, torch.split(flat, [grad.numel() for grad in grads]), strict=True):
            grad.copy_(part.view_as(grad))


def _by_type(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    found: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    return list(found.values())
