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
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

# The base of BatchNorm1d to 3d and of SyncBatchNorm, which programs test for; no public class is one for any shape.
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_bench.engine.context import is_recomputing
from gpipe_bench.engine.sequential import children_of

_Statistics = tuple[int, Tensor, Tensor]
"""Samples per channel, their mean, and the sum of their squared deviations from it."""


class DeferredBatchNorm(_BatchNorm):
    """Batch normalisation whose running statistics wait for the end of the mini-batch, see :func:`deferring`.

    Parameters, buffers and checkpoints are those of ``nn.BatchNorm1d`` to ``3d``. Outside a pipeline, and in
    evaluation, it behaves as these do.

    Shape: (N, C, ...) -> (N, C, ...).
    """

    # The statistics of each call while deferring, else None.
    gathered: list[_Statistics] | None = None

    def commit(self, m: int) -> None:
        """Update the running statistics from what m micro-batches have gathered.

        A layer that each micro-batch calls k times is updated k times, as in the plain module.
        """
        gathered, self.gathered = self.gathered or [], None
        calls = len(gathered) // m if len(gathered) % m == 0 else 1
        for call in range(calls):
            self._update(*functools.reduce(_merged, gathered[call::calls]))

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that _BatchNorm gives it
        """Normalise; while deferring, gather instead of updating."""
        if not (self.training and self.gathered is not None and self.track_running_stats):
            if is_recomputing() and self.training:
                return self._normalise(input)
            return super().forward(input)
        if not is_recomputing():
            self.gathered.append(_statistics(input.detach()))
        return self._normalise(input)

    def _update(self, count: int, mean: Tensor, deviations: Tensor) -> None:
        if self.num_batches_tracked is None:
            return
        running_mean, running_var = cast("Tensor", self.running_mean), cast("Tensor", self.running_var)
        # Nothing here needs a gradient. Without torch.no_grad(), an interrupt of the caller cannot leave grad mode off.
        self.num_batches_tracked.add_(1)
        # momentum None asks for the cumulative average
        share = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        running_mean.lerp_(mean.to(running_mean.dtype), share)
        running_var.lerp_((deviations / max(count - 1, 1)).to(running_var.dtype), share)

    def _normalise(self, input: Tensor) -> Tensor:  # noqa: A002 - as in forward
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - as in forward
        if input.dim() < 2:
            raise ValueError(f"input must have at least 2 dimensions, got {input.dim()}; pass (N, C, ...)")


def _statistics(values: Tensor) -> _Statistics:
    dims = [dim for dim in range(values.dim()) if dim != 1]
    count = values.numel() // values.size(1)
    var, mean = torch.var_mean(values.float() if values.dtype.itemsize < 4 else values, dims, correction=0)
    return count, mean, var * count


def _merged(one: _Statistics, other: _Statistics) -> _Statistics:
    """Of both samples: exact where the difference of two sums of squares would cancel (Chan, Golub, LeVeque 1979)."""
    (before, mean, deviations), (count, mean_after, deviations_after) = one, other
    total, delta = before + count, mean_after - mean
    deviations = deviations + deviations_after + delta.square() * (before * count / total)
    return total, mean + delta * (count / total), deviations


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
    """Replace every batch normalisation in ``module``, in place, by a deferred one with the same parameters.

    Returns:
        ``module``, or its replacement if it is itself a batch normalisation. Synchronised batch normalisation and
        classes derived by a user are left alone.
    """
    return _converted(module, {})


def _converted(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """The replacement of ``module``, the same one wherever it occurs."""
    if module not in known:
        plain = type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
        known[module] = _deferred(cast("_BatchNorm", module)) if plain else module
        for name, child in children_of(module):
            if child is not None:
                setattr(module, name, _converted(child, known))
    return known[module]


def _deferred(plain: _BatchNorm) -> DeferredBatchNorm:
    deferred = DeferredBatchNorm.__new__(DeferredBatchNorm)
    # One state for both objects: parameters, buffers, hooks and mode stay in step wherever the plain one is known.
    deferred.__dict__ = plain.__dict__
    return deferred
