"""Models and helpers of these tests."""

from __future__ import annotations

import torch
from torch import nn

from gpipe_bench.kernels.kernel import Alloc, Free
from gpipe_bench.models.table import MODELS
from gpipe_bench.simulator.tracing.model_trace import Trace, Tracer
from gpipe_bench.simulator.workloads.workload import TaskWork

F32 = 4


def meta(module: nn.Sequential) -> nn.Sequential:
    return module.to("meta")


def trace(module: nn.Sequential, *shape: int, dtype: torch.dtype = torch.float32) -> Trace:
    """A trace of a module whose input has ``shape``, batch first."""
    return Tracer(meta(module), torch.empty(1, *shape[1:], dtype=dtype, device="meta")).trace(shape[0])


def suite_tracer(name: str, **arguments: object) -> Tracer:
    spec = MODELS[name]
    values = spec.check(arguments)
    with torch.device("meta"):
        return Tracer(
            spec.build(**values),
            torch.empty(1, *spec.input_shape(values), dtype=getattr(torch, spec.input_type(values))),
        )


def flop(traced: Trace, direction: str) -> int:
    return sum(kernel.whole.flop for layer in traced.layers for kernel in layer.kernels(direction))


def ops(traced: Trace, direction: str) -> list[str]:
    return [kernel.op for layer in traced.layers for kernel in layer.kernels(direction)]


def allocs(steps):
    return [step.bytes for step in steps if isinstance(step, Alloc)]


def frees(steps):
    return [step.block for step in steps if isinstance(step, Free)]


def live_after(work: TaskWork, *passes: str) -> tuple[dict[int, int], int]:
    """Blocks that are left after passes of a task, and the most bytes on the way; fails on a wrong free.

    What came to the task is none of its blocks.
    """
    live: dict[int, int] = {}
    peak = 0
    for name in passes:
        for op in getattr(work, name):
            if op.kind == "alloc":
                assert op.block not in live
                live[op.block] = op.bytes
                peak = max(peak, sum(live.values()))
            elif op.kind == "scratch":
                peak = max(peak, sum(live.values()) + op.bytes)
            elif op.block >= 0:
                del live[op.block]
    return live, peak
