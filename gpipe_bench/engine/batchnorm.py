"""Deferred batch normalisation: running statistics of the mini-batch, not of its micro-batches.

Each micro-batch is normalised by its own statistics. Those are gathered over the micro-batches, and the running
statistics are updated once per mini-batch (GPipe, arXiv 1811.06965, section 2.3), as a plain module would with the
whole batch. Ordinary batch normalisation in a pipeline instead updates once per micro-batch, and once more per
recomputation.

A layer's own ``forward`` runs with running statistics that see its calls of ``F.batch_norm``. So classes that derive
from ``nn.BatchNorm1d`` to ``3d`` are deferred, too, whatever else their ``forward`` does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - its usual name

# The base of BatchNorm1d to 3d and of SyncBatchNorm, which programs test for; no public class is one for any shape.
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from gpipe_bench.autograd.sequential import children_of
from gpipe_bench.engine.context import is_recomputing
from gpipe_bench.errors import UnsupportedError

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class _Statistics(NamedTuple):
    """Samples per channel, their mean, the sum of their squared deviations from it, and the share of an update."""

    samples: int
    mean: Tensor
    deviations: Tensor
    momentum: float


class DeferredBatchNorm(_BatchNorm):
    """Mixed into a class of batch normalisation: running statistics wait for the mini-batch, see :func:`deferring`.

    Parameters, buffers, hooks and checkpoints are those of the class. Outside a pipeline, and in evaluation, it behaves
    as this does.

    Attributes:
        plain: the class.
        gathered: the statistics of each call while deferring, else None.
    """

    plain: type[_BatchNorm]
    gathered: list[_Statistics] | None = None

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle by the plain class: this one has no name by which it could be found."""
        return _blank, (self.plain,), *super().__reduce_ex__(protocol)[2:]

    def commit(self, m: int) -> None:
        """Update the running statistics from what m micro-batches have gathered.

        A layer that each micro-batch calls k times is updated k times, as in the plain module.
        """
        gathered, self.gathered = self.gathered or [], None
        # What a forward passes for the cumulative average: the counter that it sees stays until here.
        counter = self.num_batches_tracked
        average = 1.0 / (int(counter) + 1) if self.momentum is None and counter is not None else None
        calls = len(gathered) // m if len(gathered) % m == 0 else 1
        for call in range(calls):
            self._update(functools.reduce(_merged, gathered[call::calls]), average)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalise; while deferring, gather instead of updating."""
        again = is_recomputing()
        if not (self.training and self.track_running_stats) or (self.gathered is None and not again):
            return super().forward(*args, **kwargs)
        watch = _Watch(self.plain.__name__, None if again else self.gathered)
        buffers = watch.watched(self._buffers)
        # Other threads may run this layer, so its forward runs on an object with other buffers.
        before = {**self.__dict__, "_buffers": buffers}
        twin = self.plain.__new__(self.plain)
        twin.__dict__ = dict(before)
        try:
            return self.plain.forward(twin, *args, **kwargs)
        finally:
            # What it has set stays.
            self.__dict__.update(
                (key, value) for key, value in vars(twin).items() if value is not before.get(key, twin)
            )
            self._buffers.update((name, buffer) for name, buffer in buffers.items() if name not in _STATISTICS)

    def _update(self, found: _Statistics, average: float | None) -> None:
        running_mean, running_var = cast("Tensor", self.running_mean), cast("Tensor", self.running_var)
        # Nothing here needs a gradient. Without torch.no_grad(), an interrupt of the caller cannot leave grad mode off.
        share = found.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1.0 / int(self.num_batches_tracked) if share == average else share
        running_mean.lerp_(found.mean.to(running_mean.dtype), share)
        running_var.lerp_((found.deviations / max(found.samples - 1, 1)).to(running_var.dtype), share)


class _Watch:
    """What one call of a layer normalises; ``gathered`` is None in a recomputation."""

    def __init__(self, name: str, gathered: list[_Statistics] | None) -> None:
        self.name, self.gathered = name, gathered

    def watched(self, buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
        """The buffers that the ``forward`` of a layer sees: none of its statistics changes."""
        found = dict(buffers)
        for name in _STATISTICS:
            buffer = found[name]
            if buffer is not None and name == "num_batches_tracked":
                found[name] = buffer.clone()
            elif buffer is not None:
                watched = found[name] = buffer.as_subclass(_Watched)
                watched.plain, watched.watch = buffer, self
        return found

    def batch_norm(  # noqa: PLR0917 - as F.batch_norm
        self,
        input: Tensor,  # noqa: A002 - names and defaults are those of F.batch_norm
        running_mean: _Watched,
        running_var: _Watched,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        """Normalise without an update, and gather what this misses."""
        mean, var = running_mean.plain, running_var.plain
        if not training:
            return F.batch_norm(input, mean, var, weight, bias, training, momentum, eps)
        # An update from nothing with momentum 1 gives what this micro-batch adds.
        mean, var = torch.zeros_like(mean), torch.zeros_like(var)
        output = F.batch_norm(input, mean, var, weight, bias, training=True, momentum=1.0, eps=eps)
        if self.gathered is not None:
            samples = input.numel() // input.size(1)
            mean, var = (value.float() if value.dtype.itemsize < 4 else value for value in (mean, var))
            self.gathered.append(_Statistics(samples, mean, var * (samples - 1), momentum))
        return output


class _Watched(Tensor):
    """A running statistic that only ``F.batch_norm`` may use.

    Attributes:
        plain: the statistic.
        watch: told when it is used.
    """

    plain: Tensor
    watch: _Watch

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what the layer asks for; what gives no tensor reads a shape, a dtype or a device."""
        kwargs = kwargs or {}
        watches = [value.watch for value in (*args, *kwargs.values()) if isinstance(value, cls)]
        if func is F.batch_norm:
            return watches[0].batch_norm(*args, **kwargs)
        if watches:
            result = func(*(value.plain.clone() if isinstance(value, cls) else value for value in args), **kwargs)
            if not any(isinstance(value, Tensor) for value in (result if isinstance(result, tuple) else (result,))):
                return result
        where = watches[0].name if watches else "a layer"
        # No TypeError: as the result of an operator, Python would make another error of it.
        raise UnsupportedError(
            "deferred batch normalisation must use its running statistics in F.batch_norm alone, got "
            f"{getattr(func, '__name__', func)} in the forward of {where}; call F.batch_norm there, or make the "
            "pipeline with deferred_batch_norm=False"
        )


def _merged(one: _Statistics, other: _Statistics) -> _Statistics:
    """Of both samples: exact where the difference of two sums of squares would cancel (Chan, Golub, LeVeque 1979)."""
    total, delta = one.samples + other.samples, other.mean - one.mean
    deviations = one.deviations + other.deviations + delta.square() * (one.samples * other.samples / total)
    return _Statistics(total, one.mean + delta * (other.samples / total), deviations, one.momentum)


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
        ``module``, or its replacement if it is itself a batch normalisation.

    Raises:
        TypeError: a layer has running statistics that cannot be deferred.
    """
    for name, layer in module.named_modules():
        kind, where = type(layer).__name__, f"in '{name}'; use nn.BatchNorm2d there, or deferred_batch_norm=False"
        if isinstance(layer, nn.SyncBatchNorm):
            raise TypeError(f"deferred batch normalisation must be one of this process alone, got a {kind} {where}")
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise TypeError(
                f"running statistics must be those of nn.BatchNorm1d to 3d to be deferred, got a {kind} {where}"
            )
        inner = getattr(layer, "_orig_mod", layer)
        # There is no public way to ask what Module.compile() has done.
        if isinstance(inner, _BatchNorm) and (inner is not layer or vars(inner).get("_compiled_call_impl") is not None):
            raise TypeError(
                f"batch normalisation must not be compiled by itself to be deferred, got a {type(inner).__name__} that "
                f"is, in '{name}'; compile a layer around it, or use deferred_batch_norm=False"
            )
    return _converted(module, {})


def _converted(module: nn.Module, known: dict[nn.Module, nn.Module]) -> nn.Module:
    """The replacement of ``module``, the same one wherever it occurs."""
    if module not in known:
        plain = isinstance(module, _BatchNorm) and not isinstance(module, DeferredBatchNorm)
        known[module] = _deferred(cast("_BatchNorm", module)) if plain else module
        for name, child in children_of(module):
            if child is not None:
                setattr(module, name, _converted(child, known))
    return known[module]


def _deferred(plain: _BatchNorm) -> DeferredBatchNorm:
    deferred = _blank(type(plain))
    # One state for both objects: parameters, buffers, hooks and mode stay in step wherever the plain one is known.
    deferred.__dict__ = plain.__dict__
    return deferred


def _blank(plain: Any) -> DeferredBatchNorm:
    """An object of the deferred form of a class, without attributes."""
    kind = _deferred_class(plain)
    return kind.__new__(kind)


@functools.cache
def _deferred_class(plain: Any) -> type[DeferredBatchNorm]:
    body: dict[str, Any] = {"plain": plain, "__doc__": plain.__doc__, "__module__": plain.__module__}
    if later := getattr(plain, "cls_to_become", None):
        # A lazy layer takes this class when it sees its first input.
        body["cls_to_become"] = _deferred_class(later)
    return type(f"Deferred{plain.__name__}", (DeferredBatchNorm, plain), body)
