"""DistributedDataParallel around a pipeline: what it would get wrong is refused before the batch runs.

DistributedDataParallel counts the gradients of a parameter: the first one of a batch is all that it averages, unless
``static_graph=True`` has shown it how many come. Checkpoints and schedules run autograd once per micro-batch, so a
parameter gets a gradient from each.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gpipe_bench.errors import UnsupportedError


def check_replica(pipe: nn.Module, m: int, *, whole: bool) -> None:
    """Refuse a batch of m micro-batches whose gradients would not be averaged.

    Args:
        pipe: the pipeline.
        m: how many micro-batches there are.
        whole: whether autograd runs backward once, through one graph.

    Raises:
        UnsupportedError: DistributedDataParallel calls ``pipe``, and would not average its gradients.
    """
    replica = _replica(pipe)
    if replica is None or whole or replica.static_graph:
        return
    if m > 1 or replica.find_unused_parameters:
        raise UnsupportedError(
            "DistributedDataParallel must have static_graph=True around a pipeline with checkpoints or a schedule, got "
            "static_graph=False; set it, or use checkpoint='never' without a schedule"
        )


def check_no_replica(pipe: nn.Module) -> None:
    """Refuse a step that runs backward before DistributedDataParallel is ready to average.

    Raises:
        UnsupportedError: DistributedDataParallel calls ``pipe``, and would not average its gradients.
    """
    if _replica(pipe) is not None:
        raise UnsupportedError(
            "pipe.step must run outside of DistributedDataParallel, got one in its forward; return pipe(x) there and "
            "call loss.backward(), or average the gradients yourself after pipe.step"
        )


def _replica(pipe: nn.Module) -> DistributedDataParallel | None:
    """What will average the gradients of this batch, if anything; within ``no_sync()`` nothing does."""
    # PyTorch's compiler asks it, too, for the instance whose forward runs, in whatever thread.
    replica = DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]  # noqa: SLF001 - as above
    if replica is None or not replica.require_backward_grad_sync or all(each is not pipe for each in replica.modules()):
        return None
    return replica  # type: ignore[no-any-return]  # not annotated in PyTorch
