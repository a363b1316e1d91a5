"""Deferred batch normalisation: running statistics of the mini-batch, not of its micro-batches.

Each micro-batch is normalised by its own statistics. Those are gathered over the micro-batches, and the running
statistics are updated once per mini-batch (GPipe, arXiv 1811.06965, section 2.3), as a plain module would with the
whole batch. Ordinary batch normalisation in a pipeline instead updates once per micro-batch, and once more per
recomputation.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

# The base of BatchNorm1d to 3d and of SyncBatchNorm, which programs test for; no public class is one for any shape.
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gpipe_bench.engine.context import is_recomputing


class Statistics(NamedTuple):
    """What one call has seen: samples per channel, their mean, and the sum of their squared deviations from it."""

    samples: int
    mean: Tensor
    deviations: Tensor


class DeferredBatchNorm(_BatchNorm):
    """Batch normalisation whose running statistics wait for the mini-batch, see :func:`deferring`.

    Parameters, buffers, hooks and the ``state_dict`` are those of the plain layer. Outside a pipeline, and in
    evaluation, it behaves as this does.

    Attributes:
        gathered: the statistics of each call while deferring, else None.
    """

    gathered: list[Statistics] | None = None

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - its name in PyTorch
        """Normalise; while deferring, gather instead of updating."""
        again = is_recomputing()
        if not (self.training and self.track_running_stats) or (self.gathered is None and not again):
            return super().forward(input)
        self._check_input_dim(input)  # type: ignore[no-untyped-call]  # PyTorch has not annotated it
        # An update from nothing with momentum 1 gives what this micro-batch adds.
        mean = torch.zeros_like(cast("Tensor", self.running_mean))
        var = torch.zeros_like(cast("Tensor", self.running_var))
        output = F.batch_norm(input, mean, var, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps)
        if not again and self.gathered is not None:
            samples = input.numel() // input.size(1)
            mean, var = (value.float() if value.dtype.itemsize < 4 else value for value in (mean, var))
            self.gathered.append(Statistics(samples, mean, var * (samples - 1)))
        return output

    def commit(self, m: int) -> None:
        """Update the running statistics from what m micro-batches have gathered.

        A layer that each micro-batch calls k times is updated k times, as in the plain module.
        """
        gathered, self.gathered = self.gathered or [], None
        calls = len(gathered) // m if len(gathered) % m == 0 else 1
        counter = cast("Tensor", self.num_batches_tracked)
        running_mean, running_var = cast("Tensor", self.running_mean), cast("Tensor", self.running_var)
        for call in range(calls):
            found = functools.reduce(_merged, gathered[call::calls])
            # Nothing here needs a gradient. Without torch.no_grad(), an interrupt cannot leave grad mode off.
            counter.add_(1)
            share = 1.0 / int(counter) if self.momentum is None else self.momentum
            running_mean.lerp_(found.mean.to(running_mean.dtype), share)
            running_var.lerp_((found.deviations / max(found.samples - 1, 1)).to(running_var.dtype), share)


class DeferredBatchNorm1d(DeferredBatchNorm, nn.BatchNorm1d):
    """Deferred ``nn.BatchNorm1d``."""


class DeferredBatchNorm2d(DeferredBatchNorm, nn.BatchNorm2d):
    """Deferred ``nn.BatchNorm2d``."""


class DeferredBatchNorm3d(DeferredBatchNorm, nn.BatchNorm3d):
    """Deferred ``nn.BatchNorm3d``."""


_DEFERRED: Final[dict[type[nn.Module], type[DeferredBatchNorm]]] = {
    nn.BatchNorm1d: DeferredBatchNorm1d,
    nn.BatchNorm2d: DeferredBatchNorm2d,
    nn.BatchNorm3d: DeferredBatchNorm3d,
}


def _merged(one: Statistics, other: Statistics) -> Statistics:
    """Of both samples: exact where the difference of two sums of squares would cancel (Chan, Golub, LeVeque 1979)."""
    total, delta = one.samples + other.samples, other.mean - one.mean
    deviations = one.deviations + other.deviations + delta.square() * (one.samples * other.samples / total)
    return Statistics(total, one.mean + delta * (other.samples / total), deviations)


@contextmanager
def deferring(layers: Sequence[DeferredBatchNorm], m: int) -> Iterator[None]:
    """Update the running statistics of ``layers`` at the end of a block of m micro-batches; not at all if it fails."""
    for layer in layers:
        layer.gathered = []
    try:
        yield
    except BaseException:
        for layer in layers:
            layer.gathered = None
        raise
    for layer in layers:
        layer.commit(m)


def convert_deferred_batch_norm(module: nn.Module) -> nn.Module:
    """Defer every ``nn.BatchNorm1d`` to ``3d`` in ``module``, in place: each layer changes its class.

    Returns:
        ``module``.

    Raises:
        TypeError: another layer has running statistics.
    """
    for name, layer in module.named_modules():
        inner = getattr(layer, "_orig_mod", layer)  # of torch.compile(layer), which would run the plain forward
        has_statistics = isinstance(inner, (_BatchNorm, _InstanceNorm)) and inner.track_running_stats
        if not has_statistics or isinstance(inner, DeferredBatchNorm):
            continue
        compiled = inner is not layer or vars(inner).get("_compiled_call_impl") is not None
        if type(inner) not in _DEFERRED or compiled:
            raise TypeError(
                "running statistics must be those of nn.BatchNorm1d to 3d to be deferred, got "
                f"{'a compiled ' if compiled else 'a '}{type(inner).__name__} in '{name}'; use one of these, compile a "
                "layer around it, or use deferred_batch_norm=False"
            )
    for layer in module.modules():
        if type(layer) in _DEFERRED:
            layer.__class__ = _DEFERRED[type(layer)]
    return module
