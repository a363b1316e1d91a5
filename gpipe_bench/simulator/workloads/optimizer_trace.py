"""Traces the step of an optimizer on one parameter, or on its master copy as in mixed-precision training."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.simulator.tracing.steps import FOREACH, Alloc, Free, Kernel, Step
from gpipe_bench.simulator.workloads.optimizers import PROBE, OptimizerTrace

_MAKERS: Final[dict[str, Any]] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
    "rmsprop": partial(torch.optim.RMSprop, foreach=False),
    "adam": partial(torch.optim.Adam, foreach=False),
    "adamw": partial(torch.optim.AdamW, foreach=False),
}

_LOSS_SCALE: Final = 2.0**16


def make_optimizer(name: str, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of one of :data:`gpipe_bench.util.choices.OPTIMIZERS`."""
    made: torch.optim.Optimizer = _MAKERS[name](list(parameters))
    return made


def trace_step(name: str, dtype: str, *, master: bool = False) -> OptimizerTrace:
    """The second step of an optimizer, when its state is there.

    Args:
        name: of the optimizer.
        dtype: of the parameter, as in ``float32``.
        master: whether the optimizer has a copy of the parameter in float32.
    """
    parameter = _parameter(getattr(torch, dtype))
    parameter.grad = torch.empty(PROBE, dtype=parameter.dtype, device="meta")
    own = _parameter(torch.float32) if master else parameter
    optimizer = make_optimizer(name, [own])
    recorder = Recorder()
    with torch.no_grad(), recorder:
        _step(optimizer, parameter, own)
        recorder.take()
        _step(optimizer, parameter, own)
    steps = recorder.take()
    found = (step for step in steps if isinstance(step, Kernel) and step.bytes_written >= parameter.nbytes)
    # Today's optimizers update many parameters in one kernel, and gradients are given up instead of set to zero.
    kernels = tuple(step._replace(parts=()) if step.op == "zero_" else step.of_kind(FOREACH) for step in found)
    tensors = [value for value in optimizer.state[own].values() if isinstance(value, Tensor)]
    state = tuple(tensor.nbytes // PROBE for tensor in tensors if tensor.shape == own.shape)
    return OptimizerTrace(kernels, state, _peak_bytes(steps) // PROBE, own.element_size() if master else 0)


def _parameter(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(PROBE, dtype=dtype, device="meta"))


def _step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, own: nn.Parameter) -> None:
    """Update a parameter by the one that the optimizer has, its master copy or itself, and zero its gradient.

    A gradient is cast to float32 for the copy, and in float16 divided by the scale of the loss; the copy is rounded
    into the parameter.
    """
    gradient = parameter.grad
    if own is parameter or gradient is None:
        optimizer.step()
        # In place, as in the published runs.
        optimizer.zero_grad(set_to_none=False)
        return
    own.grad = gradient.float()
    if parameter.dtype is torch.float16:
        own.grad.mul_(1 / _LOSS_SCALE)
    optimizer.step()
    own.grad = None
    parameter.copy_(own)
    gradient.zero_()


def _peak_bytes(steps: Iterable[Step]) -> int:
    held: dict[int, int] = {}
    peak = 0
    for step in steps:
        if isinstance(step, Alloc):
            held[step.block] = step.bytes
        elif isinstance(step, Free):
            held.pop(step.block, None)
        peak = max(peak, sum(held.values()))
    return peak
