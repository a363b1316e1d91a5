"""Traces the step of an optimizer on one parameter, or on its master copy as in mixed-precision training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import torch
from torch import Tensor, nn

from gpipe_bench.kernels.kernel import Alloc, Free, Kernel, Step
from gpipe_bench.kernels.optimizers import make_optimizer
from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.simulator.workloads.optimizers import PROBE, OptimizerTrace

_LOSS_SCALE: Final = 2.0**16


def trace_step(name: str, dtype: str, *, master: bool = False, published: bool = False) -> OptimizerTrace:
    """The second step of an optimizer, when its state is there.

    Args:
        name: of the optimizer.
        dtype: of the parameter, as in ``float32``.
        master: whether the optimizer has a copy of the parameter in float32.
        published: whether it has a launch for each parameter, and sets gradients to zero.
    """
    parameter = _parameter(getattr(torch, dtype))
    parameter.grad = torch.empty(PROBE, dtype=parameter.dtype, device="meta")
    own = _parameter(torch.float32) if master else parameter
    optimizer = make_optimizer(name, [own], foreach=not published)
    recorder = Recorder()
    with torch.no_grad(), recorder:
        _step(optimizer, parameter, own, published=published)
        recorder.take()
        _step(optimizer, parameter, own, published=published)
    steps = recorder.take()
    # Others count steps, on the host.
    kernels = (step for step in steps if isinstance(step, Kernel))
    updates = tuple(kernel for kernel in kernels if kernel.whole.bytes_written >= parameter.nbytes)
    tensors = [value for value in optimizer.state[own].values() if isinstance(value, Tensor)]
    state = tuple(tensor.nbytes // PROBE for tensor in tensors if tensor.shape == own.shape)
    masters = own.element_size() if master else 0
    return OptimizerTrace(updates, state, _peak_bytes(steps) // PROBE, masters, together=not published)


def _parameter(dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(PROBE, dtype=dtype, device="meta"))


def _step(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, own: nn.Parameter, *, published: bool) -> None:
    """Update a parameter by the one that the optimizer has, its master copy or itself.

    A gradient is cast to float32 for the copy, and in float16 divided by the scale of the loss; the copy is rounded
    into the parameter.
    """
    assert parameter.grad is not None  # noqa: S101 - it has one while it is traced
    if own is not parameter:
        own.grad = parameter.grad.float()
        if parameter.dtype is torch.float16:
            torch._foreach_mul_([own.grad], 1 / _LOSS_SCALE)
    optimizer.step()
    if own is not parameter:
        own.grad = None
        torch._foreach_copy_([parameter], [own])
    if published:
        parameter.grad.zero_()


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
