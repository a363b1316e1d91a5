"""Deferred batch normalisation: running statistics of the mini-batch, not of its micro-batches.

Each micro-batch is normalised by its own statistics. Those are gathered over the micro-batches, and the running
statistics are updated once per mini-batch (GPipe, arXiv 1811.06965, section 2.3), as a plain module would with the
whole batch. Ordinary batch normalisation in a pipeline instead updates once per micro-batch, and once more per
recomputation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name
from torch.nn.modules.batchnorm import _BatchNorm

from gpipe_bench.engine.context import is_recomputing

__all__ = ["DeferredBatchNorm", "convert_deferred_batch_norm", "deferring"]


class DeferredBatchNorm(_BatchNorm):
    """Batch normalisation whose running statistics wait for the end of the mini-batch, see :func:`deferring`.

    Parameters, buffers and checkpoints are those of ``nn.BatchNorm1d`` to ``3d``. Outside a pipeline, and in
    evaluation, it behaves as these do.

    Shape: (N, C, ...) -> (N, C, ...).
    """

    # Gathered over micro-batches: samples per channel, mean, sum of squared deviations. Merging these is exact where
    # the difference of two sums of squares would cancel (Chan, Golub and LeVeque 1979).
    _gathered: tuple[int, Tensor, Tensor] | None = None
    _deferring: bool = False

    def begin(self) -> None:
        """Start gathering."""
        self._gathered = None
        self._deferring = True

    def forget(self) -> None:
        """Stop gathering, and leave the running statistics as they were."""
        self._gathered = None
        self._deferring = False

    def commit(self) -> None:
        """Update the running statistics from the micro-batches gathered since :meth:`begin`."""
        gathered, self._gathered, self._deferring = self._gathered, None, False
        if gathered is None or self.num_batches_tracked is None:
            return
        count, mean, deviations = gathered
        running_mean, running_var = cast("Tensor", self.running_mean), cast("Tensor", self.running_var)
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            # momentum None asks for the cumulative average
            share = 1.0 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
            running_mean.lerp_(mean.to(running_mean.dtype), share)
            running_var.lerp_((deviations / max(count - 1, 1)).to(running_var.dtype), share)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name that _BatchNorm gives it
        """Normalise; while deferring, gather instead of updating."""
        if not (self.training and self._deferring and self.track_running_stats):
            if is_recomputing() and self.training:
                return self._normalise(input)
            return super().forward(input)
        if not is_recomputing():
            self._gather(input.detach())
        return self._normalise(input)

    def _normalise(self, input: Tensor) -> Tensor:  # noqa: A002 - as in forward
        return F.batch_norm(input, None, None, self.weight, self.bias, training=True, momentum=0.0, eps=self.eps)

    def _gather(self, values: Tensor) -> None:
        dims = [dim for dim in range(values.dim()) if dim != 1]
        count = values.numel() // values.size(1)
        var, mean = torch.var_mean(values.float() if values.dtype.itemsize < 4 else values, dims, correction=0)
        deviations = var * count
        if self._gathered is not None:
            before, mean_before, deviations_before = self._gathered
            total = before + count
            delta = mean - mean_before
            deviations = deviations_before + deviations + delta.square() * (before * count / total)
            mean = mean_before + delta * (count / total)
            count = total
        self._gathered = count, mean, deviations

    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002 - as in forward
        if input.dim() < 2:
            raise ValueError(f"input must have at least 2 dimensions, got {input.dim()}; pass (N, C, ...)")


@contextmanager
def deferring(layers: Sequence[DeferredBatchNorm]) -> Iterator[None]:
    """Update the running statistics of ``layers`` once, at the end of the block; not at all if it fails."""
    for layer in layers:
        layer.begin()
    try:
        yield
    except BaseException:
        for layer in layers:
            layer.forget()
        raise
    for layer in layers:
        layer.commit()


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
        for name, child in list(module._modules.items()):  # noqa: SLF001 - named_children() leaves out second names
            if child is not None:
                setattr(module, name, _converted(child, known))
    return known[module]


def _deferred(plain: _BatchNorm) -> DeferredBatchNorm:
    deferred = DeferredBatchNorm.__new__(DeferredBatchNorm)
    # One state for both objects: parameters, buffers, hooks and mode stay in step wherever the plain one is known.
    deferred.__dict__ = plain.__dict__
    return deferred
