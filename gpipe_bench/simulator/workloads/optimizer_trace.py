"""Traces the step of an optimizer on one parameter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn

from gpipe_bench.simulator.tracing.recorder import Recorder
from gpipe_bench.simulator.tracing.steps import Alloc, Free, Kernel, Step
from gpipe_bench.simulator.workloads.optimizers import PROBE, OptimizerTrace

__all__ = ["trace_step"]

_MAKERS: Final = MappingProxyType(
    {
        "sgd": lambda parameters: _unwrapped(torch.optim.SGD)(parameters, lr=0.1, foreach=False),
        "momentum": lambda parameters: _unwrapped(torch.optim.SGD)(parameters, lr=0.1, momentum=0.9, foreach=False),
        "rmsprop": lambda parameters: _unwrapped(torch.optim.RMSprop)(parameters, foreach=False),
        "adam": lambda parameters: _unwrapped(torch.optim.Adam)(parameters, foreach=False),
    }
)


def trace_step(name: str, dtype: str) -> OptimizerTrace:
    """The second step of an optimizer, when its state is there.

    Args:
        name: of the optimizer.
        dtype: of the parameter, as in ``float32``.
    """
    make: Callable[[Any], torch.optim.Optimizer] = _MAKERS[name]
    parameter = nn.Parameter(torch.empty(PROBE, dtype=getattr(torch, dtype), device="meta"))
    parameter.grad = torch.empty(PROBE, dtype=parameter.dtype, device="meta")
    optimizer = make([parameter])
    recorder = Recorder()
    with torch.no_grad(), recorder:
        optimizer.step()
        recorder.take()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    steps = recorder.take()
    kernels = tuple(step for step in steps if isinstance(step, Kernel) and step.bytes_written >= parameter.nbytes)
    tensors = [value for value in optimizer.state[parameter].values() if isinstance(value, torch.Tensor)]
    state = tuple(tensor.nbytes // PROBE for tensor in tensors if tensor.shape == parameter.shape)
    return OptimizerTrace(kernels, state, _peak_bytes(steps) // PROBE)


def _unwrapped(kind: type[torch.optim.Optimizer]) -> Callable[..., torch.optim.Optimizer]:
    """An optimizer without what keeps PyTorch's compiler out of its methods: loading that takes half a second."""
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in ("add_param_group", "step", "zero_grad")}
    return type(kind.__name__, (kind,), methods)


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
