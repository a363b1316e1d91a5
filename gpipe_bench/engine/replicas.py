"""DistributedDataParallel and FSDP beside a pipeline: what they would get wrong is refused before the batch runs.

DistributedDataParallel counts the gradients of a parameter: the first one of a batch is all that it averages, unless
``static_graph=True`` has shown it how many come. Checkpoints and schedules run autograd once per micro-batch, so a
parameter gets a gradient from each. FSDP averages when gradients of a layer's inputs are there: with I and W too early.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpipe_bench.errors import UnsupportedError

# The instance whose forward runs, in whatever thread; PyTorch's compiler asks for it, too.
active_replica: Callable[[], DistributedDataParallel | None] = DistributedDataParallel._get_active_ddp_module  # noqa: SLF001 - as above


def check_replica(replica: DistributedDataParallel, pipe: nn.Module, m: int) -> None:
    """Refuse a batch of m micro-batches, with checkpoints or a schedule, whose gradients would not be averaged.

    Args:
        replica: what :func:`active_replica` gives.
        pipe: the pipeline.
        m: how many micro-batches there are.

    Raises:
        UnsupportedError: DistributedDataParallel calls ``pipe``, and would not average its gradients.
    """
    if replica.static_graph or not (m > 1 or replica.find_unused_parameters):
        return
    if _averages(replica, pipe):
        raise UnsupportedError(
            "DistributedDataParallel must have static_graph=True around a pipeline with checkpoints or a schedule, got "
            "static_graph=False; set it, or use checkpoint='never' without a schedule"
        )


def check_no_replica(replica: DistributedDataParallel, pipe: nn.Module) -> None:
    """Refuse a step that runs backward before DistributedDataParallel is ready to average.

    Raises:
        UnsupportedError: DistributedDataParallel calls ``pipe``, and would not average its gradients.
    """
    if _averages(replica, pipe):
        raise UnsupportedError(
            "pipe.step must run outside of DistributedDataParallel, got one in its forward; return pipe(x) there and "
            "call loss.backward(), or average the gradients yourself after pipe.step"
        )


def check_layers(layers: nn.Module) -> None:
    """Refuse layers that average their gradients themselves, where these come from one micro-batch after another.

    Args:
        layers: of a pipeline that is about to train with checkpoints or a schedule, in a process of several.

    Raises:
        ValueError: there is such a layer.
    """
    # Importing it takes a second. A program with such a layer has imported it already.
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kinds = (DistributedDataParallel, *((fsdp.FSDPModule, fsdp.FullyShardedDataParallel) if fsdp else ()))
    for name, layer in layers.named_modules():
        if kind := next((kind.__name__ for kind in kinds if isinstance(layer, kind)), None):
            raise ValueError(
                "layers must not average gradients themselves, since checkpoints and schedules run backward once per "
                f"micro-batch, got '{name}', which is a {kind}; average gradients after the step, or pass replicas= to "
                "gpipe_bench.distributed.Pipe"
            )


def _averages(replica: DistributedDataParallel, pipe: nn.Module) -> bool:
    """Whether it is ``pipe`` that runs in it, or a module that holds it; within ``no_sync()`` it averages nothing."""
    return replica.require_backward_grad_sync and any(each is pipe for each in replica.modules())
