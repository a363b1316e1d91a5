"""Balance by size: what each layer keeps in memory for its backward pass, plus parameters and what hangs on them.

Bytes are counted, not read from an allocator, so every device gives the same numbers. On the ``meta`` device they cost
neither time nor memory, and a model too large for any device can be balanced.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpipe_bench.balance.kept import kept_costs
from gpipe_bench.balance.layers import sandbox, stages
from gpipe_bench.balance.partition import check_partitions, split_min_max
from gpipe_bench.balance.sample import Sample, check_model, device_of, first_microbatch, tensors_in

__all__ = ["balance_by_size", "layer_sizes"]


def balance_by_size(
    n: int,
    module: nn.Sequential,
    sample: Sample,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
    cache: str | Path | None = None,
) -> list[int]:
    """Layers per partition such that the largest partition is as small as it can be.

    The result is optimal for the sizes of :func:`layer_sizes`.

    Args:
        n: partitions.
        module: the model; it is left as it was.
        sample: one mini-batch, a Tensor or a tuple of Tensors.
        chunks: micro-batches that the mini-batch is split into; activations of the first are counted.
        param_scale: copies of a trainable parameter that training keeps: itself, its gradient, and what the optimizer
            adds. SGD 2-3, RMSprop 3-5, Adam 4-5.
        device: where to run the layers; by default where ``sample`` is. ``meta`` runs nothing.
        cache: folder in which sizes are kept, see :mod:`gpipe_bench.balance.kept`; by default they are not.

    Returns:
        n positive numbers that sum to the number of layers.

    Raises:
        BalanceError: a ValueError; n is not positive or exceeds the layers.
        TypeError: ``module`` or ``sample`` is of another type.
        ValueError: ``chunks``, ``param_scale`` or the shape of ``sample``.
    """
    check_model(module, sample)
    check_partitions(n, len(module))
    sizes = layer_sizes(module, sample, chunks=chunks, param_scale=param_scale, device=device, cache=cache)
    return split_min_max(sizes, n)


def layer_sizes(
    module: nn.Sequential,
    sample: Sample,
    *,
    chunks: int = 1,
    param_scale: float = 2.0,
    device: torch.device | str | int | None = None,
    cache: str | Path | None = None,
) -> list[float]:
    """Bytes of each layer: activations of one micro-batch, parameters times ``param_scale``, and buffers.

    Activations are what the layer allocates and what is still alive once the next layer has run: kept for a backward
    pass, stashed, or passed on. Frozen parameters and buffers count once. Arguments and errors are those of
    :func:`balance_by_size`.
    """
    check_model(module, sample)
    if chunks < 1:
        raise ValueError(f"chunks must be at least 1, got {chunks}; use 1 to count the whole mini-batch")
    if not param_scale >= 0:
        raise ValueError(f"param_scale must not be negative, got {param_scale}; use 2 for SGD, 4 for Adam")
    where = device_of(sample, device)
    microbatch = first_microbatch(module, sample, chunks)
    question = {"cost": "size", "device": where.type, "param_scale": param_scale}
    return kept_costs(cache, module, microbatch, question, lambda: _sizes(module, microbatch, where, param_scale))


def _sizes(module: nn.Sequential, microbatch: Sample, device: torch.device, param_scale: float) -> list[float]:
    sizes: list[float] = []
    before: _Kept | None = None
    with sandbox(device):
        for stage in stages(module, microbatch, device):
            with _Births() as births:
                stage.forward()
            # Both layers have run: unless a graph keeps what passed between them, it is free from here on.
            stage.inputs = None
            if before is not None:
                before.output = None
                sizes.append(before.size())
            before = _Kept(births, _state_bytes(stage.layer, param_scale), stage.roots(), stage.output)
    return sizes if before is None else [*sizes, before.size()]


class _Kept:
    """What remains of a layer that has run: its graph and, while somebody needs it, its output."""

    def __init__(self, births: _Births, state_bytes: float, roots: list[Tensor], output: object) -> None:
        self._births = births
        self._state_bytes = state_bytes
        # A node of the graph keeps the graph alive, but not the tensor that it belongs to.
        self._graph = [root.grad_fn for root in roots]
        self.output = output

    def size(self) -> float:
        return self._births.alive_bytes() + self._state_bytes


def _state_bytes(layer: nn.Module, param_scale: float) -> float:
    parameters = sum(
        parameter.nbytes * (param_scale if parameter.requires_grad else 1) for parameter in layer.parameters()
    )
    return parameters + sum(buffer.nbytes for buffer in layer.buffers())


class _Births(TorchDispatchMode):  # type: ignore[no-untyped-call]  # PyTorch leaves the mode untyped
    """Sees every storage that operations under it allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._born: list[weakref.ref[torch.UntypedStorage]] = []

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        # A view or a change in place gives the storage of an argument, which is not new.
        known = [*_storages(args), *_storages(kwargs)]
        for storage in _storages(result):
            if not any(storage is other for other in known):
                known.append(storage)
                self._born.append(weakref.ref(storage))
        return result

    def alive_bytes(self) -> int:
        """Bytes of the storages that something still holds."""
        return sum(storage.nbytes() for storage in (born() for born in self._born) if storage is not None)


def _storages(value: object) -> list[torch.UntypedStorage]:
    return [tensor.untyped_storage() for tensor in tensors_in(value) if tensor.layout is torch.strided]
